"""What runs on a node: agents, which own what must survive the worker processes."""
