"""A module that can't be imported."""

raise RuntimeError("there is no licence")
