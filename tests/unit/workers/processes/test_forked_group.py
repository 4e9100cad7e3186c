"""Where the kit's local ranks come from: the zygote that runs use, without Ray."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

from polytrain.testing.processes import eventually
from polytrain.workers.messages import ConnectionClosedError
from polytrain.workers.processes import forked_group
from polytrain.workers.processes.cache import kept_process, let_go
from polytrain.workers.processes.forked_group import ForkedGroup

ENTRY = "polytrain.testing.local_rank"


@pytest.fixture(autouse=True)
def _none_is_kept() -> Iterator[None]:
    let_go()
    yield
    let_go()


def children_of(pid: int | None) -> list[psutil.Process]:
    return [] if pid is None else psutil.Process(pid).children()


def forked(world: ForkedGroup, *ranks: int) -> list[socket.socket]:
    """Ranks that wait for what they are to do: their agents' ends."""
    ours = []
    for rank in ranks:
        mine, theirs = socket.socketpair()
        with theirs:
            world.fork(rank, theirs)
        ours.append(mine)
    return ours


def test_worlds_that_are_alike_share_a_zygote() -> None:
    kept = []
    for colour in ("red", "red", "blue"):
        with ForkedGroup(ENTRY, ["json"], {"COLOUR": colour}) as world:
            forked(world, 0)
        kept.append(kept_process())
    assert kept[0] == kept[1] != kept[2]
    assert not psutil.pid_exists(kept[0] or 0)


def test_it_tells_how_a_rank_has_ended() -> None:
    with ForkedGroup(ENTRY, [], {}) as world:
        [ours] = forked(world, 0)
        # Without an order there is nothing to do.
        ours.close()
        while not world.ends:
            world.read()
        assert world.ends == {0: "exited with code 1"}


def test_a_rank_that_does_not_end_is_killed_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has closed its connection, and goes on."""
    monkeypatch.setattr(forked_group, "_ENDS_WITHIN_S", 0.05)
    with ForkedGroup(ENTRY, [], {}) as world:
        forked(world, 0)
        assert world.end_of(0) == "killed 0.05 s after the end of its connection"
        monkeypatch.undo()


def test_no_rank_outlives_its_world() -> None:
    with ForkedGroup(ENTRY, [], {}) as world:
        connections = forked(world, 0, 1, 2)
    assert world.ends == dict.fromkeys(range(3), "killed by SIGKILL")
    assert children_of(kept_process()) == []
    assert [connection.recv(1) for connection in connections] == [b""] * 3


def test_a_world_that_is_interrupted_leaves_nothing() -> None:
    def interrupted() -> None:
        with ForkedGroup(ENTRY, [], {}) as world:
            forked(world, 0, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert children_of(kept_process()) == []


def test_a_zygote_that_dies_is_noticed_and_followed_by_another() -> None:
    with ForkedGroup(ENTRY, [], {}) as world:
        forked(world, 0)
    first = kept_process()
    assert first is not None
    with ForkedGroup(ENTRY, [], {}) as world:
        os.kill(first, signal.SIGKILL)
        with pytest.raises((ConnectionClosedError, OSError)):
            world.read()
    with ForkedGroup(ENTRY, [], {}) as world:
        forked(world, 0)
    assert kept_process() not in (None, first)
    assert eventually(lambda: not psutil.pid_exists(first))
