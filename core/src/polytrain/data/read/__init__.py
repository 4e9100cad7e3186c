"""Turns the data that users pass into pieces that any process can read rows from."""
