"""What shows a run: page, progress, doctor, command line."""
