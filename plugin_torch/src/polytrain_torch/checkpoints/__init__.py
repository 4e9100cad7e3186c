"""Training state in checkpoints: shared and per-rank state, file formats, and trial loads."""
