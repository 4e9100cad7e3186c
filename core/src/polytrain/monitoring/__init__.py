"""Hang and straggler detection: the progress page, the probes, the two detectors, stacks."""
