"""Prints and logs the output of ranks and of the driver; training never waits for it."""
