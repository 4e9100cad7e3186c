"""The state of training in checkpoints: whose it is, how it is stored, whether it loads again."""
