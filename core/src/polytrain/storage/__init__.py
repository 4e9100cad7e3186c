"""Stores runs in a directory or in object storage, behind one small interface."""

DEFAULT_STORAGE = "~/polytrain_results"
"""Where runs are stored for which no other place is given."""
