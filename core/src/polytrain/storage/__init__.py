"""Where runs are stored: a directory or object storage, behind one small interface."""
