"""Data loaders that are split by rank and resume where a checkpoint was made."""
