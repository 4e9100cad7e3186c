"""Types of columns: how Arrow, NumPy and pandas hold their values."""
