"""Validation of checkpoints while training goes on."""
