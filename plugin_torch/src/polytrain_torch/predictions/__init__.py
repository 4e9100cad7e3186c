"""Predictions by a module: checks of the options, and the predictor."""
