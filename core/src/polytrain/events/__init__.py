"""The events of an attempt that agents send to the driver."""
