"""Data sets: which rank has which rows, where they come from, and how a worker reads them."""
