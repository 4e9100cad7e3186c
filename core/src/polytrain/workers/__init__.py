"""The processes of a run: agents own resources, zygotes fork, worker processes train."""
