"""Pickles, fingerprints and inspects users' functions and values."""
