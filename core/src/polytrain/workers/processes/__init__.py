"""Starts worker processes: a zygote forks them, or spawns them if forking isn't safe."""
