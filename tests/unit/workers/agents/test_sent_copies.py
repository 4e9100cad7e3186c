"""An agent sends its rank's copies to another host, whose agent keeps the last whole one."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.unit.checkpoint.checkpoints import ATTEMPT, store_in

from polytrain.checkpoint.manifest import directory_name
from polytrain.checkpoint.parts import PartStored, StagedPart, StateWritten, stored_part
from polytrain.checkpoint.staging import COPIES, Stagings, remove
from polytrain.events.attempt import CopySent, StateUnwritten
from polytrain.workers.agents import kept_copies, sent_copies
from polytrain.workers.agents.kept_copies import KeptCopies, Room
from polytrain.workers.agents.part_storer import if_undamaged, of_state
from polytrain.workers.agents.sent_copies import Copy, Piece, SentCopies, Whole

CONTENT = {"model.pt": b"weights" * 1000, "state/rest.pt": b"", "other": b"x"}


@dataclass
class Host:
    """The other host: what arrives there is kept, up to a number of pieces."""

    kept: KeptCopies
    rank: int = 1
    pieces: int = 1_000
    error: Exception = field(default_factory=lambda: ConnectionError("lost"))

    async def keep(self, sent: Piece | Whole) -> None:
        if self.pieces == 0:
            raise self.error
        self.pieces -= 1
        await asyncio.to_thread(self.kept.take, sent)


class Pair:
    """An agent's rank 0, and its neighbour."""

    def __init__(self, path: Path) -> None:
        self.scratch = path / "a"
        (path / "b").mkdir(parents=True)
        self.scratch.mkdir()
        self.events: list[CopySent] = []
        self.host = Host(KeptCopies(path / "b", Room()))
        self.sent = SentCopies(self.events.append)
        self.sent.neighbour = self.host
        self.launch(ATTEMPT.attempt)
        self.copies: dict[int, Copy] = {}

    def make(self, number: int) -> None:
        """Make a copy as a worker process does, which keeps the last two."""
        name = directory_name(number, ATTEMPT)
        staging = Stagings(scratch=self.scratch / COPIES, near=None).new(name, 0)
        for file, content in CONTENT.items():
            (staging / file).parent.mkdir(exist_ok=True)
            (staging / file).write_bytes(content)
        part = StagedPart(
            attempt_id=ATTEMPT,
            rank=0,
            checkpoint=number,
            staged=staging,
            stamps={},
            step=number,
            metrics={},
            positions={},
        )
        while len(self.copies) > 1:
            [oldest, *_] = self.copies
            staged = self.copies.pop(oldest).part.staged
            assert staged is not None
            remove(staged)
        self.copies[number] = Copy(part, is_report=False, is_ahead=True)
        self.sent.made(self.copies)

    def runs(self, *steps: Callable[[], None]) -> None:
        """Run steps on an event loop; what is sent arrives before the next one."""

        async def run() -> None:
            for step in steps:
                step()
                while (sending := self.sent._sending) is not None and not sending.done():
                    await asyncio.wait([sending])

        asyncio.run(run())

    def launch(self, attempt: int) -> None:
        """Start an attempt."""

        async def run() -> None:
            await self.sent.launched(attempt, 0, self.scratch)
            await asyncio.to_thread(self.host.kept.launched, attempt)

        asyncio.run(run())

    def numbers(self) -> list[int]:
        return [n for n in range(100) if self.host.kept.copy(ATTEMPT.attempt, 0, n) is not None]


def test_a_copy_arrives_whole(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.runs(partial(pair.make, 3))
    assert [(each.number, each.holder, each.reason) for each in pair.events] == [(3, 1, "")]
    found = pair.host.kept.copy(ATTEMPT.attempt, 0, 3)
    assert found is not None
    copy, hashes = found
    assert (copy.part.step, copy.is_report, copy.is_ahead) == (3, False, True)
    staged = copy.part.staged
    assert staged is not None
    assert {name: (staged / name).read_bytes() for name in hashes} == CONTENT


def test_the_next_one_is_sent_when_all_ranks_are_asked_to(tmp_path: Path) -> None:
    """Until the number is known, the rank goes on; what it has sent stays for other ranks."""
    pair = Pair(tmp_path)
    pair.runs(
        *(partial(pair.make, number) for number in (1, 2, 3, 4)),
        partial(pair.sent.send_from, ATTEMPT.attempt, 6, 1, pair.copies),
        *(partial(pair.make, number) for number in (5, 6, 7)),
    )
    assert [each.number for each in pair.events] == [1, 6]
    assert pair.numbers() == [1, 6]
    for copy in pair.sent.there.values():
        assert copy.part.staged is not None
        assert (copy.part.staged / "model.pt").read_bytes() == CONTENT["model.pt"]
    assert sorted(pair.sent.there) == [1, 6]


def test_a_copy_that_is_deleted_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker process has deleted it, and the message that says so isn't read yet."""
    pair = Pair(tmp_path)
    link_one = os.link

    def link_late(source: Path, *given: Any, **options: Any) -> None:
        if directory_name(1, ATTEMPT) in str(source):
            staged = pair.scratch / COPIES / f"{directory_name(1, ATTEMPT)}-rank_0"
            remove(staged)
        link_one(source, *given, **options)

    monkeypatch.setattr(os, "link", link_late)
    pair.runs(partial(pair.make, 1))
    assert pair.events == []
    pair.runs(partial(pair.make, 2))
    pair.runs(partial(pair.sent.send_from, ATTEMPT.attempt, 3, None, {}), partial(pair.make, 3))
    assert [(each.number, each.reason) for each in pair.events] == [(2, ""), (3, "")]
    assert pair.numbers() == [2, 3]


def test_the_copy_that_all_ranks_have_stays_until_there_is_a_newer_one(tmp_path: Path) -> None:
    """The others had passed 2, and sent a later one in its place."""
    pair, attempt = Pair(tmp_path), ATTEMPT.attempt
    steps = [partial(pair.make, 1)]
    for number, common in ((2, 1), (3, 1), (4, 3)):
        steps += [partial(pair.sent.send_from, attempt, number, common, {})]
        steps += [partial(pair.make, number)]
    pair.runs(*steps[:-2])
    assert pair.numbers() == sorted(pair.sent.there) == [1, 3]
    pair.runs(*steps[-2:])
    assert pair.numbers() == sorted(pair.sent.there) == [3, 4]


def test_large_copies_are_not_deleted_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds, in which the agent would answer nothing."""
    threads = []

    def noted(staged: Path) -> None:
        threads.append(threading.current_thread())
        remove(staged)

    for module in (kept_copies, sent_copies):
        monkeypatch.setattr(module, "remove", noted)
    pair = Pair(tmp_path)
    for number in (1, 2, 3):
        pair.runs(
            partial(pair.make, number),
            partial(pair.sent.send_from, ATTEMPT.attempt, number + 1, number, {}),
        )
    pair.launch(ATTEMPT.attempt + 1)
    for thread in threading.enumerate():
        if thread.name == "polytrain-call":
            thread.join()
    assert len(threads) > 4
    assert threading.current_thread() not in threads
    assert not [file for file in (pair.scratch / "sent").rglob("*") if file.is_file()]


def test_copies_are_deleted_though_the_system_refuses_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent isn't lost for that."""
    pair, attempt = Pair(tmp_path), ATTEMPT.attempt
    for number in (1, 2):
        pair.runs(
            partial(pair.make, number),
            partial(pair.sent.send_from, attempt, number + 1, number, {}),
        )
    refused = RuntimeError("can't start new thread")
    refuse = partial(monkeypatch.setattr, threading.Thread, "start", Mock(side_effect=refused))
    pair.runs(refuse, partial(pair.make, 3), monkeypatch.undo)
    assert (pair.events[-1].holder, pair.events[-1].reason) == (None, str(refused))
    assert sorted(pair.sent.there) == [2, 3]
    refuse()
    asyncio.run(pair.sent.launched(attempt + 1, 0, pair.scratch))
    assert not [file for file in (pair.scratch / "sent").rglob("*") if file.is_file()]


def test_a_copy_that_is_cut_off_does_not_count(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.runs(partial(pair.make, 1))
    pair.host.pieces = 2
    pair.runs(partial(pair.sent.send_from, ATTEMPT.attempt, 2, 1, {}), partial(pair.make, 2))
    assert pair.numbers() == [1]
    # The loss of a host is reported elsewhere.
    assert [each.number for each in pair.events] == [1]


def test_a_neighbour_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=8000))
    monkeypatch.setattr(kept_copies, "shutil", usage)
    pair = Pair(tmp_path)
    pair.runs(partial(pair.make, 1))
    [sent] = pair.events
    assert sent.holder is None
    assert "set TMPDIR to a directory with more" in sent.reason
    assert pair.numbers() == []


def begun(rank: int, *, size: int, content: bytes = b"", name: str = "model.pt") -> Piece:
    part = StagedPart(
        attempt_id=ATTEMPT,
        rank=rank,
        checkpoint=1,
        staged=None,
        stamps={},
        step=1,
        metrics={},
        positions={},
    )
    return Piece(part=part, common=None, size=size, name=name, offset=0, content=content)


def test_room_is_not_given_to_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each agent of a host keeps another rank's copies, on the same disk."""
    free = 500
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(kept_copies, "shutil", usage)
    room = Room()
    first, second = (KeptCopies(tmp_path, room) for _ in range(2))
    for kept in (first, second):
        kept.launched(ATTEMPT.attempt)
    first.take(begun(0, size=200))
    # The first one needs 400: for this copy, and for the next one.
    with pytest.raises(OSError, match="room for 0 MB"):
        second.take(begun(1, size=100))
    first.take(begun(0, size=200, content=b"x" * 200))
    free -= 200
    second.take(begun(1, size=50))
    # What it hasn't used is free again in the next attempt.
    first.launched(ATTEMPT.attempt + 1)
    second.take(begun(2, size=100))


def test_nothing_is_left_of_a_copy_for_which_the_disk_is_too_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptCopies(tmp_path, Room())
    kept.launched(ATTEMPT.attempt)
    kept.take(begun(0, size=20, content=b"x" * 10))
    assert [file for file in tmp_path.rglob("*") if file.is_file()]

    def is_full(descriptor: int, mode: str) -> None:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fdopen", is_full)
        with pytest.raises(OSError, match="No space left"):
            kept.take(begun(0, size=20, content=b"x" * 10, name="other"))
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_copies_of_an_earlier_attempt_are_deleted(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.runs(partial(pair.make, 1))
    pair.launch(ATTEMPT.attempt + 1)
    assert not [file for file in (tmp_path / "b").rglob("*") if file.is_file()]
    assert not [file for file in (pair.scratch / "sent").rglob("*") if file.is_file()]
    late = Piece(
        part=pair.copies[1].part, common=None, size=1, name="model.pt", offset=0, content=b""
    )
    with pytest.raises(ValueError, match="another attempt"):
        pair.host.kept.take(late)


def test_an_earlier_attempt_that_is_loaded_late_ends_no_copies(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.runs(partial(pair.make, 1))
    pair.launch(ATTEMPT.attempt - 1)
    pair.runs(partial(pair.sent.send_from, ATTEMPT.attempt, 2, 1, {}), partial(pair.make, 2))
    assert [(each.attempt, each.number) for each in pair.events] == [(0, 1), (0, 2)]
    assert pair.numbers() == [1, 2]


@pytest.mark.parametrize("file", [None, *CONTENT])
def test_a_damaged_copy_is_refused(tmp_path: Path, file: str | None) -> None:
    pair = Pair(tmp_path)
    pair.runs(partial(pair.make, 3))
    found = pair.host.kept.copy(ATTEMPT.attempt, 0, 3)
    assert found is not None
    copy, hashes = found
    assert copy.part.staged is not None
    if file is not None:
        with (copy.part.staged / file).open("ab") as damaged:
            damaged.write(b"!")
    (tmp_path / "run").mkdir()
    outcome = stored_part(store_in(tmp_path / "run"), copy.part)
    assert isinstance(outcome, PartStored)
    as_event = of_state(copy, is_copy=True)
    event = if_undamaged(as_event, hashes, host="b")(outcome)
    if file is None:
        assert isinstance(event, StateWritten)
    else:
        assert isinstance(event, StateUnwritten)
        assert event.reason == f"its copy on b is damaged: {file} isn't what was sent"
