"""Decides, in pure functions that return each decision with its reason."""
