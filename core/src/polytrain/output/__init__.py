"""The ranks' output and the driver's own: printed, logged, never waited for."""
