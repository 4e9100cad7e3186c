"""Where runs are kept: a directory or an object storage, behind one small interface."""
