"""Queries Ray's own state."""
