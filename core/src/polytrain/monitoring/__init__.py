"""Hangs and stragglers: what worker processes show, what is measured, who is late."""
