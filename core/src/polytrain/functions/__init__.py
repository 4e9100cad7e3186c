"""Users' functions and values: pickled, fingerprinted, looked into."""
