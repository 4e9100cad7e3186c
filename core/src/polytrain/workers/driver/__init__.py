"""The driver's side: the workers of a run, and how their agents are placed and launched."""
