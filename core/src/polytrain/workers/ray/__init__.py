"""Agents on Ray."""
