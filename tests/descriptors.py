"""Descriptors of the process that runs the tests."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from polytrain.testing.processes import eventually

FIRST_REFUSED = 1024
"""The first number of a descriptor that `select.select` refuses."""

LEFT_AT_MOST = 8
"""Descriptors that are no files of a disk, and that a file of tests may leave open. A library opens
some when it is first used, and a kept zygote has some."""

UNIT = Path(__file__).parent / "unit"


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """The numbers below `FIRST_REFUSED` are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        while stack.enter_context(open(os.devnull)).fileno() < FIRST_REFUSED:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module", autouse=True)
def closed_descriptors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if a file of unit tests leaves files open, or many other descriptors.

    One process runs thousands of tests: what each leaves open would add up to its limit.
    """
    before = opened()
    yield
    if UNIT in request.path.parents and not are_few(since(before)):
        # Threads that hung in a test may still be on their way out.
        is_closed = eventually(lambda: gc.collect() >= 0 and are_few(since(before)))
        left = "\n".join(f"  {number}: {name}" for number, name in since(before).items())
        assert is_closed, f"these tests leave descriptors open:\n{left}"


def opened(process: int | str = "self") -> dict[int, str]:
    """The names of a process's descriptors, by their numbers."""
    names = {}
    for number in map(int, os.listdir(f"/proc/{process}/fd")):
        # It may close one meanwhile, as this process does that of the directory.
        with suppress(FileNotFoundError):
            names[number] = os.readlink(f"/proc/{process}/fd/{number}")
    return names


def since(before: dict[int, str]) -> dict[int, str]:
    """The descriptors that have been opened since then, by number or by name."""
    return {number: name for number, name in opened().items() if before.get(number) != name}


def are_few(descriptors: dict[int, str]) -> bool:
    """Whether a file of tests may leave these open."""
    return len(descriptors) <= LEFT_AT_MOST and not any(map(is_file, descriptors.values()))


def is_file(name: str) -> bool:
    """Whether a descriptor is that of a file on a disk: neither a device, nor memory or a pipe."""
    return name.startswith("/") and not name.startswith(("/dev/", "/memfd:"))
