"""Predicts any number of rows: in this process or in workers, as an array or as files."""
