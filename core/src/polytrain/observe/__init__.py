"""Observes worker processes while they run."""
