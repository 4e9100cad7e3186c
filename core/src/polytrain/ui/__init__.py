"""What users and their programs see of a run: output and observers."""
