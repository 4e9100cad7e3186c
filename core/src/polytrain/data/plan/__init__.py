"""Decides which rows come next, in which order, and on which rank. Pure."""
