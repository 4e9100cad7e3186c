"""What the driver hears of an attempt."""
