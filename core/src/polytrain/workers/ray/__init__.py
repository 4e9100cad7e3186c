"""Runs agents on Ray."""
