"""What all tests share."""

from __future__ import annotations

import os
import signal

from polytrain_plugins import backend_names

pytest_plugins = ["pytester"]

REQUIRED = "POLYTRAIN_REQUIRED_BACKENDS"


def pytest_configure() -> None:
    """Refuse to run without the backends that must be there: a run can't silently test nothing."""
    # What a shell starts in the background ignores it; tests, and scripts of theirs, don't.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    required = {name for name in os.environ.get(REQUIRED, "").split(",") if name}
    missing = sorted(required - set(backend_names()))
    if missing:
        raise RuntimeError(
            f"{REQUIRED} names backends that are not installed: {', '.join(missing)}"
        )
