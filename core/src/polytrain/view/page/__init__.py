"""A run as one page: what its journal and checkpoints tell, and how it is drawn."""
