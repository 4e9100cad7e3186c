"""Descriptors of the process that runs the tests."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

FIRST_REFUSED = 1024
"""The first number of a descriptor that `select.select` refuses."""


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
