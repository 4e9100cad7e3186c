"""Runs a script that makes its own process group, as `torchrun` does."""
