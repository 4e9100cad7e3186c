"""What all tests share."""

from __future__ import annotations

import os

from polytrain_plugins import backend_names

pytest_plugins = ["pytester"]

REQUIRED = "POLYTRAIN_REQUIRED_BACKENDS"


def pytest_configure() -> None:
    """Refuse to run without the backends that must be there: a run can't silently test nothing."""
    required = {name for name in os.environ.get(REQUIRED, "").split(",") if name}
    missing = sorted(required - set(backend_names()))
    if missing:
        raise RuntimeError(
            f"{REQUIRED} names backends that are not installed: {', '.join(missing)}"
        )
