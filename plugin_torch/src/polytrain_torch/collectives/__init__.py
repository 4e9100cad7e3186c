"""Collective operations: who calls them, over which process group, in which order."""
