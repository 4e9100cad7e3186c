"""Backends of the core itself."""
