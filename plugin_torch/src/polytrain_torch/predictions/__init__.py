"""Predictions by a module: the options, and the process that predicts."""
