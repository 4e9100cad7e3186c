"""Processes for code that waits for them: the zygote that runs use forks them, without Ray."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from polytrain.testing.processes import eventually
from polytrain.workers.processes import pool, zygote_connection
from polytrain.workers.processes.cache import kept_processes, let_go
from polytrain.workers.processes.pool import Ended, ProcessPool, Sent, forked_pool

ENTRY = "echoing"

CODE = """
import os
import signal

from polytrain.workers.processes.channel import SocketChannel


def main(connection, descriptors):
    channel = SocketChannel(connection)
    while (message := channel.receive()) != ["end"]:
        if message == ["close"]:
            connection.close()
            signal.pause()
        for _ in range(message[1] if message[0] == "repeat" else 1):
            channel.send([*message, os.environ.get("COLOUR")])
    channel.send(["last"])
    return 3
"""


@pytest.fixture(autouse=True)
def _entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The processes' code; no zygote is kept before and after."""
    (tmp_path / f"{ENTRY}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    # One that is busy is kept all the same.
    monkeypatch.setattr(zygote_connection, "_ANSWER_S", 60.0)
    let_go()
    yield
    let_go()


def children_of_kept() -> list[psutil.Process]:
    return [child for pid in kept_processes() for child in psutil.Process(pid).children()]


def sent(processes: ProcessPool) -> Sent:
    event = processes.next(30)
    assert isinstance(event, Sent), event
    return event


def test_pools_that_are_alike_share_a_zygote() -> None:
    kept = []
    for colour in ("red", "red", "blue"):
        with forked_pool(ENTRY, ["json"], {"COLOUR": colour}) as processes:
            processes.start(0, ["hello"])
            assert sent(processes).message == ["hello", colour]
        kept.append(kept_processes())
    assert len(kept[0]) == 1
    assert kept[0] == kept[1] < kept[2]


def test_all_that_a_process_sent_comes_before_its_end() -> None:
    with forked_pool(ENTRY, [], {}) as processes:
        processes.start(7, ["repeat", 3])
        processes.send(7, ["end"])
        messages = [sent(processes).message[0] for _ in range(4)]
        ended = processes.next(30)
    assert messages == ["repeat"] * 3 + ["last"]
    assert isinstance(ended, Ended)
    assert (ended.number, ended.how) == (7, "exited with code 3")


def test_a_process_waits_until_its_messages_are_taken() -> None:
    """It would fill the memory of this process with what nobody has taken."""
    size, count = 1 << 20, 50
    with forked_pool(ENTRY, [], {}) as processes:
        processes.start(0, ["repeat", count, "x" * size])
        first = sent(processes)
        assert processes._events.qsize() <= 2
        others = [sent(processes) for _ in range(count - 1)]
        assert all(each.message == first.message for each in others)


def test_a_process_that_does_not_end_is_killed_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has closed its connection, and goes on."""
    monkeypatch.setattr(pool, "_ENDS_WITHIN_S", 0.05)
    with forked_pool(ENTRY, [], {}) as processes:
        processes.start(0, ["close"])
        ended = processes.next(30)
        assert isinstance(ended, Ended)
        assert ended.how == "killed 0.05 s after the end of its connection"
        monkeypatch.undo()


def test_no_process_outlives_its_pool() -> None:
    with forked_pool(ENTRY, [], {}) as processes:
        for number in range(3):
            processes.start(number, ["hello"])
        for _ in range(3):
            sent(processes)
    ends = [processes.next(0) for _ in range(3)]
    assert {each.how for each in ends if isinstance(each, Ended)} == {"killed by SIGKILL"}
    assert children_of_kept() == []


def test_a_pool_that_is_interrupted_leaves_nothing() -> None:
    def interrupted() -> None:
        with forked_pool(ENTRY, [], {}) as processes:
            processes.start(0, ["hello"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert children_of_kept() == []


def test_a_zygote_that_dies_is_noticed_and_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with forked_pool(ENTRY, [], {}) as processes:
        processes.start(0, ["hello"])
    (first,) = kept_processes()
    with monkeypatch.context() as limited, forked_pool(ENTRY, [], {}) as processes:
        processes.start(0, ["hello"])
        sent(processes)
        os.kill(first, signal.SIGKILL)
        ended = processes.next(30)
        assert isinstance(ended, Ended)
        assert ended.how == "killed with its zygote"
        # The next one has another zygote.
        processes.start(1, ["hello"])
        assert sent(processes).number == 1
        # The pool waits for its end without a thread too.
        refused = RuntimeError("can't start new thread")
        limited.setattr(threading.Thread, "start", Mock(side_effect=refused))
    assert kept_processes() == set()
    with forked_pool(ENTRY, [], {}) as processes:
        processes.start(0, ["hello"])
        sent(processes)
    (second,) = kept_processes()
    assert second != first
    assert eventually(lambda: not psutil.pid_exists(first))
