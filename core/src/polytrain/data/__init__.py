"""Data sets: which rows belong to whom, where they come from, and how a worker reads them."""
