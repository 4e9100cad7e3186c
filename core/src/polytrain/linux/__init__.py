"""What Linux offers."""
