"""What a user calls: a trainer is made, run, and leaves a result."""
