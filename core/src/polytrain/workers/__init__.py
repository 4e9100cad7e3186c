"""The processes of a run: agents that own everything, zygotes that fork, workers that train."""
