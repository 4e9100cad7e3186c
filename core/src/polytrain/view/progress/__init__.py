"""Progress of a run, on a terminal and as JSON lines."""
