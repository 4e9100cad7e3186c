"""A model that all ranks train: DDP, and what DDP silently leaves out."""
