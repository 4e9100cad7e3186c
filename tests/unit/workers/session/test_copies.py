"""Copies of a training's state: which the agent hears of, and which remain on the disk."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tests.sweeps import only_in_sweep

from polytrain.checkpoint.manifest import AttemptId, directory_name
from polytrain.checkpoint.parts import PartStored, misplaced_part, stored_part
from polytrain.checkpoint.staging import COPIES, Stagings
from polytrain.checkpoint.store import CHECKPOINTS, CheckpointStore
from polytrain.policy.copies import CopyPace
from polytrain.storage.location import Location
from polytrain.workers.processes.channel import FrameBuffer, Message, SocketChannel
from polytrain.workers.session import copies as module
from polytrain.workers.session.copies import Copies
from polytrain.workers.session.messages import to_part
from polytrain.workers.session.survivor import NotCleanError, Place

PLACE = Place(step=3, metrics={"loss": 0.5}, positions={})


class Sent:
    """The agent's side of the channel."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, *messages: Message) -> None:
        self.messages.extend(messages)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    yield


def copies_in(
    scratch: Path, channel: Any, attempt: int = 0, *, is_alone: bool = True, rank: int = 0
) -> Copies:
    return Copies(
        channel=channel,
        attempt=AttemptId(token=1, attempt=attempt),
        rank=rank,
        is_alone=is_alone,
        scratch=scratch,
        pace=CopyPace(every=1),
        copying=uncounted,
    )


def writes(content: bytes) -> Callable[[Path], Place]:
    def write(directory: Path) -> Place:
        (directory / "model").write_bytes(content)
        return PLACE

    return write


def raises(error: Exception) -> Callable[[Path], Place]:
    def write(directory: Path) -> Place:
        (directory / "model").write_bytes(b"torn")
        raise error

    return write


def held(messages: list[Message]) -> dict[int, Message]:
    """Return the copies that the agent knows, by number."""
    found: dict[int, Message] = {}
    for message in messages:
        if message[0] == "copied":
            found[message[1]] = message
        else:
            assert message[0] == "uncopied"
            del found[message[1]]
    return found


def there(scratch: Path) -> list[bytes]:
    return [each.read_bytes() for each in (scratch / COPIES).glob("*/model")]


def test_only_the_newest_copy_remains(tmp_path: Path) -> None:
    sent = Sent()
    copies = copies_in(tmp_path, sent)
    for content in (b"one", b"two", b"three"):
        copies.step(writes(content), size=5)
    assert there(tmp_path) == [b"three"]
    assert list(held(sent.messages)) == [3]
    assert (Path(held(sent.messages)[3][2]) / "model").read_bytes() == b"three"


def test_with_other_ranks_the_copy_before_stays_until_the_next(tmp_path: Path) -> None:
    """Another rank, which is at the same step, may not have its part of the newest yet."""
    sent = Sent()
    copies = copies_in(tmp_path, sent, is_alone=False)
    for number, content in ((10, b"one"), (20, b"two")):
        copies.step(writes(content), size=5, number=number)
    assert list(held(sent.messages)) == [10, 20]
    assert sorted(there(tmp_path)) == [b"one", b"two"]
    copies.step(writes(b"three"), size=5, number=30)
    assert list(held(sent.messages)) == [20, 30]
    assert sorted(there(tmp_path)) == [b"three", b"two"]


def test_ranks_that_have_the_same_state_copy_nothing_and_say_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent = Sent()
    for attempt in (0, 1):
        for rank in (0, 1):
            copies = copies_in(tmp_path, sent, attempt, is_alone=False, rank=rank)
            copies.step(writes(b"one"), size=5)
            copies.step(writes(b"two"), size=5)
    assert (sent.messages, there(tmp_path)) == ([], [])
    [record] = caplog.records
    assert "memory=1) keeps no copies with several workers of this kind" in record.message


def test_a_copy_that_is_being_deleted_counts_no_more(tmp_path: Path) -> None:
    sent = Sent()
    copies = copies_in(tmp_path, sent, is_alone=False)
    for number in (1, 2):
        copies.step(writes(b"whole"), size=5, number=number)

    def write(directory: Path) -> Place:
        # Here the process may be killed.
        assert list(held(sent.messages)) == [2]
        return writes(b"whole")(directory)

    copies.step(write, size=5, number=3)
    assert list(held(sent.messages)) == [2, 3]


class Driver:
    """What tells all ranks to drop the copy that one of them couldn't make."""

    def __init__(self, scratch: Path, ranks: int = 2) -> None:
        self.sent = [Sent() for _ in range(ranks)]
        self.inboxes: list[list[tuple[int, bool]]] = [[] for _ in self.sent]
        self.refusals: list[Message] = []
        self.ranks = []
        for rank, sent in enumerate(self.sent):
            copies = copies_in(scratch / str(rank), sent, is_alone=False, rank=rank)
            copies.dropped = partial(self.dropped, rank)
            copies.scratch.mkdir()
            self.ranks.append(copies)

    def dropped(self, rank: int) -> list[tuple[int, bool]]:
        for sent in self.sent:
            for message in [each for each in sent.messages if each[0] == "uncopyable"]:
                sent.messages.remove(message)
                self.refusals.append(message)
                for inbox in self.inboxes:
                    inbox.append((message[1], message[3]))
        found, self.inboxes[rank] = self.inboxes[rank], []
        return found

    def in_common(self) -> set[int]:
        return set.intersection(*(set(held(each.messages)) for each in self.sent))


def test_a_copy_that_a_rank_can_not_make_is_dropped_by_all(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    first, second = driver.ranks
    for number in (1, 2):
        first.step(writes(b"whole"), size=5, number=number)
        second.step(writes(b"whole"), size=5, number=number)
    first.step(writes(b"whole"), size=5, number=3)
    second.step(raises(NotCleanError("a weight isn't finite")), size=5, number=3)
    assert driver.in_common() == {2}

    def write(directory: Path) -> Place:
        assert driver.in_common() == {2}, "a rank may be killed while it copies the next step"
        return writes(b"whole")(directory)

    for copies in driver.ranks:
        copies.step(write, size=5, number=4)
    assert driver.in_common() == {2, 4}
    assert driver.refusals == [["uncopyable", 3, "a weight isn't finite", False]]


def test_a_driver_that_is_slow_to_answer_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def sleep(duration: float) -> None:
        nonlocal now
        now += duration

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    driver = Driver(tmp_path)
    first, second = driver.ranks
    answer = driver.dropped
    for rank, copies in enumerate(driver.ranks):
        copies.dropped = lambda rank=rank: answer(rank) if now > 9 else []
    for number in (1, 2):
        for copies in driver.ranks:
            copies.step(writes(b"whole"), size=5, number=number)
    first.step(writes(b"whole"), size=5, number=3)
    second.step(raises(NotCleanError("a weight isn't finite")), size=5, number=3)

    def write(directory: Path) -> Place:
        assert driver.in_common() == {2}, "a rank may be killed while it copies the next step"
        return writes(b"whole")(directory)

    for copies in driver.ranks:
        copies.step(write, size=5, number=4)
    assert driver.in_common() == {2, 4}


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_rank_that_can_copy_no_more_ends_the_copies_of_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_behind: bool
) -> None:
    """All keep the last one that all have, also if the others come to the step afterwards."""
    driver = Driver(tmp_path)
    first, second = driver.ranks
    for number in (1, 2):
        for copies in driver.ranks:
            copies.step(writes(b"whole"), size=5, number=number)
    full = raises(OSError(errno.ENOSPC, "No space left on device"))
    steps = [lambda: first.step(writes(b"whole"), size=5, number=3)]
    steps.insert(is_behind - 1, lambda: second.step(full, size=5, number=3))
    for step in steps:
        step()
    for number in (4, 5, 6):
        for copies in driver.ranks:
            copies.step(writes(b"never"), size=5, number=number)
    assert driver.in_common() == {2}
    assert b"never" not in there(tmp_path / "0") + there(tmp_path / "1")
    [record] = caplog.records
    assert "No space left on device" in record.message


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_copy_that_waits_for_another_batch_counts_once_there_is_one(
    tmp_path: Path, is_alone: bool
) -> None:
    sent = Sent()
    copies = copies_in(tmp_path, sent, is_alone=is_alone)
    copies.step(writes(b"1"), size=5, number=1)
    copies.step(writes(b"2"), size=5, number=2, is_confirmed=False)
    assert [*held(sent.messages)] == [1]
    copies.confirm()
    assert [*held(sent.messages)] == ([2] if is_alone else [1, 2])


def test_a_copy_that_the_training_could_not_continue_from_leaves_the_one_before(
    tmp_path: Path,
) -> None:
    sent = Sent()
    copies = copies_in(tmp_path, sent)
    copies.step(writes(b"1"), size=5)
    copies.step(writes(b"2"), size=5, is_confirmed=False)
    copies.withdraw("the epoch is over")
    copies.confirm()
    assert [*held(sent.messages)] == [1]
    assert there(tmp_path) == [b"1"]


def test_a_new_attempt_removes_the_copies_of_the_last(tmp_path: Path) -> None:
    copies_in(tmp_path, Sent()).step(writes(b"old"), size=5)
    copies_in(tmp_path, Sent(), attempt=1).step(writes(b"new"), size=5)
    assert there(tmp_path) == [b"new"]


def test_a_state_that_is_not_clean_leaves_the_copy_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent = Sent()
    copies = copies_in(tmp_path, sent)
    copies.step(writes(b"one"), size=5)
    for _ in range(2):
        copies.step(raises(NotCleanError("its variable 'total' changes")), size=5)
    assert there(tmp_path) == [b"one"]
    assert [record.message for record in caplog.records] == [
        "CheckpointConfig(memory=1) can't copy the state at this step, and tries later ones: "
        "its variable 'total' changes."
    ]
    copies.step(writes(b"two"), size=5)
    assert there(tmp_path) == [b"two"]


def test_an_error_ends_the_copies_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies = copies_in(tmp_path, Sent())
    full = OSError(errno.ENOSPC, "No space left on device")
    copies.step(raises(full), size=5)
    copies.step(writes(b"never"), size=5)
    assert there(tmp_path) == []
    [record] = caplog.records
    assert "keeps no copies of the training's state" in record.message
    assert "No space left on device" in record.message


def test_two_copies_must_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=150_000_000))
    monkeypatch.setattr(module, "shutil", usage)
    copies_in(tmp_path, Sent()).step(writes(b"large"), size=100_000_000)
    [record] = caplog.records
    assert "two copies need 200 MB" in record.message
    assert "room for 150 MB" in record.message
    assert there(tmp_path) == []


def test_the_first_copy_leaves_the_directory_in_which_another_rank_makes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / COPIES).mkdir()

    def begins(self: Stagings, *given: Any, **options: Any) -> Path:
        assert (tmp_path / COPIES).is_dir(), "the other rank has just found it"
        return new(self, *given, **options)

    new = Stagings.new
    monkeypatch.setattr(Stagings, "new", begins)
    copies = copies_in(tmp_path, Sent(), is_alone=False)
    copies.step(writes(b"one"), size=5, number=1)
    assert there(tmp_path) == [b"one"]


@pytest.mark.sweep
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "several"])
@pytest.mark.parametrize("kills", [10, only_in_sweep(1000)])
def test_a_torn_copy_is_never_taken(tmp_path: Path, kills: int, is_alone: bool) -> None:
    """A process that copies without end is killed within a copy, or at any moment."""
    random = Random(0)
    torn = 0
    for number in range(kills):
        run = tmp_path / str(number)
        (run / "scratch").mkdir(parents=True)
        within = None if number % 2 else Kill(random.randrange(1, 4), random.randrange(1, WHOLE))
        copies = _killed(run / "scratch", is_alone, random.uniform(0, 0.004), within)
        is_torn = any(not _is_whole(each) for each in (run / "scratch" / COPIES).iterdir())
        assert is_torn or within is None
        torn += is_torn
        store = CheckpointStore(location=Location.of(run))
        assert copies
        for copy in copies.values():
            part = to_part(copy, attempt_id=ATTEMPT, rank=0)
            assert misplaced_part(part, scratch=run / "scratch" / COPIES, near=None) is None
            assert isinstance(stored_part(store, part), PartStored)
            assert _is_whole(run / CHECKPOINTS / directory_name(part.checkpoint, ATTEMPT))
        shutil.rmtree(run)
    print(f"{torn} of {kills} kills left a torn copy")


ATTEMPT = AttemptId(token=1, attempt=0)
FILES = ("model", "optimizer", "progress")
SIZE = 1 << 19
WHOLE = SIZE * len(FILES)


class Kill(NamedTuple):
    """The place in a process's copies at which it ends: after some bytes of one of them."""

    copy: int
    """Its number, from 0. The agent knows those before."""

    written: int
    """Bytes of it that are on the disk, at least 1 and not all."""


def _is_whole(copy: Path) -> bool:
    """Return whether a copy has all its files, each of the same step."""
    contents = [(copy / name).read_bytes() if (copy / name).exists() else b"" for name in FILES]
    return len(contents[0]) == SIZE and all(each == contents[0][:1] * SIZE for each in contents)


def _killed(
    scratch: Path, is_alone: bool, after_s: float, within: Kill | None
) -> dict[int, Message]:
    """Run a process until it is killed; return the copies that its agent knows.

    Args:
        scratch: its directory.
        is_alone: whether it has no peers.
        after_s: when it is killed, after its first copy, if `within` is None.
        within: where it kills itself.
    """
    ours, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        _copy_for_ever(scratch, is_alone, its, within)
    its.close()
    frames = FrameBuffer()
    with ours:
        messages = frames.feed(ours.recv(4096))
        if within is None:
            time.sleep(after_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        while sent := ours.recv(4096):
            messages += frames.feed(sent)
    return held(messages)


def _copy_for_ever(
    scratch: Path, is_alone: bool, connection: socket.socket, within: Kill | None
) -> None:
    def write(directory: Path) -> Place:
        copy = next(numbers)
        content = bytes([copy % 256]) * SIZE
        for start, name in zip(range(0, WHOLE, SIZE), FILES, strict=True):
            with (directory / name).open("wb", buffering=0) as file:
                if within is not None and within.copy == copy and within.written - start < SIZE:
                    file.write(content[: within.written - start])
                    os.kill(os.getpid(), signal.SIGKILL)
                file.write(content)
        return PLACE

    numbers = itertools.count()
    # It ends also if the test has ended before it.
    signal.alarm(60)
    try:
        copies = copies_in(scratch, SocketChannel(connection), is_alone=is_alone)
        for number in itertools.count(1):
            copies.step(write, size=WHOLE, number=number)
    finally:
        os._exit(1)
