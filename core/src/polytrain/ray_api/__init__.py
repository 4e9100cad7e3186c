"""What is asked of Ray itself."""
