"""Data sets whose rows stream past."""
