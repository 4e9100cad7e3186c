"""A run's journal, and what is read from it."""
