"""Whether a descriptor of any number can be read, and how long that is waited for."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from polytrain.linux.processes import is_readable

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


@pytest.mark.usefixtures("many_open_files")
def test_a_descriptor_may_have_any_number() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert ours.fileno() > FIRST_REFUSED
        assert not is_readable(ours)
        theirs.sendall(b"x")
        assert is_readable(ours, None)


def test_an_end_can_be_read() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        assert is_readable(ours)


def test_a_wait_ends_after_its_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not is_readable(ours, 0.01)
