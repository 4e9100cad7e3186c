"""The driver's side: places and launches the agents of a run's workers."""
