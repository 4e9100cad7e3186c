"""Validates checkpoints while training continues."""
