"""Whether a descriptor of any number can be read, and how long that is waited for."""

import socket

import pytest
from tests.descriptors import FIRST_REFUSED

from polytrain.linux.processes import is_readable


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
