"""Handles text: names, JSON, messages."""
