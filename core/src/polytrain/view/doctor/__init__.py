"""Tries what runs need of a machine, its storage and its backends."""
