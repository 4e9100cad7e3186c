"""Starts worker processes: a zygote forks them, or spawns them if forking is unsafe."""
