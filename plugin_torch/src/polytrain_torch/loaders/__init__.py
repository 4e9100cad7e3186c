"""Data loaders that are split by rank, and resume at a checkpoint's position."""
