"""Agents, which run on each node and own the resources that must survive worker processes."""
