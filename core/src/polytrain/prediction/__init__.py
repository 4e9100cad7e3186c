"""Predictions for any number of rows: by this process or by workers, as an array or as files."""
