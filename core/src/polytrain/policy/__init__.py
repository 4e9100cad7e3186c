"""Decisions: pure functions of what is known, each returned with its reason."""
