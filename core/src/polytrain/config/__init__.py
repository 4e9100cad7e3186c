"""What a user sets, with its constraints."""
