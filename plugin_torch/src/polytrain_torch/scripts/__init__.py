"""A script that makes its own process group, run as `torchrun` runs it."""
