"""Columns: Arrow types that every reader knows, from whatever Python, NumPy or a file has."""
