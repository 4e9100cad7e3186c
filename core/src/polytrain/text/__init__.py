"""Text: names, JSON, what is printed."""
