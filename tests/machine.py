"""Tests run in several processes at once; those marked `alone` have the machine to themselves.

A test that measures time, or which process is busy, would measure the tests beside it as well.
Each test holds a lock while it runs: shared by most, exclusive for these. One after another in the
same process, they keep it: in between, the others would start tests, and end them before the next.

Each process has Ray's files in a directory of its own: Ray writes the address of a test's cluster
there, and a run of another process would join that cluster, and be ended by Ray together with it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

_LOCKS = "polytrain_locks"
"""Under this name pytest-xdist gives every process of a run the directory of its locks."""

_directory: tempfile.TemporaryDirectory[str] | None = None

_turn_of_several: ExitStack | None = None
"""Of the test before and this one, both of which are marked."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: no other test runs beside this one.")
    # Short: the paths of Ray's sockets are in it, which have 107 characters at most.
    ray_directory = tempfile.TemporaryDirectory(prefix="pt-", ignore_cleanup_errors=True)
    os.environ["RAY_TMPDIR"] = ray_directory.name
    config.add_cleanup(ray_directory.cleanup)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called in the process that hands out the tests, once for each that runs them."""
    global _directory
    if _directory is None:
        _directory = tempfile.TemporaryDirectory(prefix="polytrain-tests-")
    node.workerinput[_LOCKS] = _directory.name


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """The outermost wrapper: fixtures and the test's timeout start after the wait."""
    global _turn_of_several
    directory = getattr(item.config, "workerinput", {}).get(_LOCKS)
    if directory is None:
        return (yield)
    with ExitStack() as turn:
        if _turn_of_several is None:
            turn.enter_context(_turn(Path(directory), alone=_is_alone(item)))
        else:
            turn.push(_turn_of_several)
            _turn_of_several = None
        result = yield
        if _is_alone(item) and _is_alone(nextitem):
            _turn_of_several = turn.pop_all()
        return result


def _is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


@contextmanager
def _turn(directory: Path, *, alone: bool) -> Iterator[None]:
    with _opened(directory / "gate") as gate, _opened(directory / "machine") as machine:
        # A test that waits to be alone holds the gate: the others finish, and none starts.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        # Closing isn't enough: a process that the test has forked may still have it open.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
