"""Wraps Linux interfaces: processes, control groups, clocks, shared memory."""
