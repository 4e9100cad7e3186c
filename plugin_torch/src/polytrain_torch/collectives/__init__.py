"""Collective operations: checks of their order, process groups, and shared memory."""
