"""What a user calls: makes a trainer, runs it and returns a result."""
