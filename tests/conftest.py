"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from polytrain_plugins import backend_names

pytest_plugins = [
    "pytester",
    "tests.commits",
    "tests.descriptors",
    "tests.failures",
    "tests.machine",
    "tests.minutes",
    "tests.problems",
    "tests.sweeps",
    "tests.zygotes",
]

# A busy machine makes an example slow without making it wrong; the suite's own timeout remains.
settings.register_profile("polytrain", deadline=None)
settings.load_profile("polytrain")

REQUIRED = "POLYTRAIN_REQUIRED_BACKENDS"

LONGEST_FIRST = ("e2e", "conformance", "plugin_torch", "core", "architecture")
"""Folders of long tests: at the end of a test run, short ones keep all processes busy."""


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run without the backends that must be there: a run can't silently test nothing."""
    config.addinivalue_line("markers", "on_ray: the test's runs have their workers on Ray")
    # Runs on this machine have as many workers as tests want, however many CPUs it has.
    os.environ.setdefault("POLYTRAIN_LOCAL_CPUS", "4")
    # Tests run beside each other: a thread that waits for its next work with a busy loop takes the
    # CPU from a thread that has some. Libraries read it when they are imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # No test downloads models or data. Set for one of them alone, it would take another zygote.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # What a shell starts in the background ignores it; tests, and scripts of theirs, don't.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    required = {name for name in os.environ.get(REQUIRED, "").split(",") if name}
    missing = sorted(required - set(backend_names()))
    if missing:
        raise RuntimeError(
            f"{REQUIRED} names backends that are not installed: {', '.join(missing)}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in what is imported now: there is next to none, now and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_order)


def _order(item: pytest.Item) -> tuple[int, Path, bool]:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    place = LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)
    # A Ray that is there would be used by the tests that don't ask for it.
    return place, item.path, item.get_closest_marker("on_ray") is not None
