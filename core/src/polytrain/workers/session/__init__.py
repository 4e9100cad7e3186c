"""Runs in a worker process: the session of a training function, and its messages."""
