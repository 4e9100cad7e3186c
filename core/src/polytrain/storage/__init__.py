"""Stores runs in a directory or in object storage, behind one small interface."""
