"""Where the kit's local ranks come from: real processes, no Ray."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

from polytrain.testing import forker
from polytrain.testing.forker import Forker, warm_forker
from polytrain.testing.processes import eventually
from polytrain.workers.messages import ConnectionClosedError

ENVIRONMENT = dict(os.environ)


@pytest.fixture(autouse=True)
def _none_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(forker, "_kept", None)
    yield
    if forker._kept is not None:
        forker._kept[1].close()


def forked_by(of: Forker) -> int:
    """A rank that waits for what it is to do."""
    ours, theirs = socket.socketpair()
    with theirs:
        pid = of.fork(theirs)
    ours.detach()  # its other end stays open
    return pid


def is_there(pid: int) -> bool:
    try:
        # One whose parent has gone may never be reaped, where nobody adopts it.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_alike_worlds_share_one() -> None:
    first = warm_forker(["json"], ENVIRONMENT)
    assert warm_forker(["json"], {**ENVIRONMENT, "PYTEST_CURRENT_TEST": "other"}) is first
    assert warm_forker(["json"], {**ENVIRONMENT, "COLOUR": "red"}) is not first
    assert first.has_ended


def test_it_tells_how_a_rank_has_ended() -> None:
    of = warm_forker([], ENVIRONMENT)
    pid = forked_by(of)
    os.kill(pid, signal.SIGTERM)
    assert of.wait(pid) == -signal.SIGTERM
    pid = forked_by(of)
    of.kill(pid)
    assert not is_there(pid)


def test_ranks_end_with_it() -> None:
    of = warm_forker([], ENVIRONMENT)
    pid = forked_by(of)
    of.close()
    assert eventually(lambda: not is_there(pid))


def test_one_that_was_interrupted_is_followed_by_another() -> None:
    of = warm_forker([], ENVIRONMENT)
    pid = forked_by(of)

    def expire(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(TimeoutError):
            of.wait(pid)
    finally:
        signal.signal(signal.SIGALRM, before)
    another = warm_forker([], ENVIRONMENT)
    assert another is not of
    pid = forked_by(another)
    another.kill(pid)


def test_one_that_dies_is_noticed() -> None:
    of = warm_forker([], ENVIRONMENT)
    os.kill(of._process.pid, signal.SIGKILL)
    with pytest.raises((ConnectionClosedError, OSError)):
        forked_by(of)
    assert eventually(lambda: of.has_ended)
    assert warm_forker([], ENVIRONMENT) is not of
