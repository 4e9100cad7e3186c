"""What a loop carries from step to step outside of its `TrainingState` is found."""

from __future__ import annotations

import csv
import ctypes
import io
import itertools
import multiprocessing
import os
import queue
import random
import re
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from itertools import count, islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import polytrain_torch
from polytrain_torch import micro_batches
from polytrain_torch.survivors.loop_variables import Frames, Loop, frames_from

STEPS = 4


class Training:
    """Runs a loop, and looks at it at its first step and in its last one."""

    def __init__(self, progress: dict[str, Any]) -> None:
        self.progress = progress
        self.loop: Loop | None = None
        self.frames: Frames = ()
        self.carried: str | None = "never looked at"
        self.step = 0

    def batches(self) -> Iterator[int]:
        caller = self.caller()
        for _ in range(STEPS):
            yield from self.batch(caller)
        self.look(has_batch=False)

    def batch(self, caller: FrameType | None) -> Iterator[int]:
        self.frames = frames_to_here(caller)
        yield 1

    def caller(self) -> FrameType | None:
        return sys._getframe(2)

    def steps(self) -> None:
        """Take an optimizer's step."""
        if self.loop is None:
            self.loop = Loop(self.frames, [self])
        self.step += 1
        if self.step == STEPS:
            self.look(has_batch=True)

    def look(self, *, has_batch: bool) -> None:
        assert self.loop is not None
        self.carried = self.loop.carried(self.frames, self.progress, has_batch=has_batch)


def frames_to_here(frame: FrameType | None) -> Frames:
    """Leave out the frames of the test itself."""
    found = []
    for each, at in frames_from(frame):
        if each.f_code is found_by.__code__:
            break
        found.append((each, at))
    return tuple(found)


def test_a_loop_stays_where_it_is_when_the_interpreter_replaces_an_instruction() -> None:
    class Batches:
        def __getitem__(self, _: int) -> Frames:
            return frames_from(sys._getframe(1))[:1]

        def __iter__(self) -> Iterator[Frames]:
            for _ in range(100):
                yield frames_from(sys._getframe(1))[:1]

    batches = Batches()
    by_number, in_turn = set(), set()
    for number in range(100):
        by_number.add(batches[number])
    for frames in batches:
        in_turn.add(frames)
    assert (len(by_number), len(in_turn)) == (1, 1)


def found_by(loop: Callable[[Training], None], **progress: Any) -> str | None:
    training = Training(progress)
    loop(training)
    return training.carried


def plain(training: Training) -> None:
    for batch in training.batches():
        loss = batch * 2
        training.steps()
        print(loss)
        if training.step == STEPS:
            break


def counter(training: Training) -> None:
    count = 0
    for _ in training.batches():
        count += 1
        training.steps()
        if training.step == STEPS:
            break
    print(count)


def attribute(training: Training) -> None:
    class Counter:
        count = 0

    counter = Counter()
    for _ in training.batches():
        counter.count += 1
        training.steps()
        if training.step == STEPS:
            break


def numbered(training: Training) -> None:
    for number, _ in enumerate(training.batches()):
        training.steps()
        print(number)
        if training.step == STEPS:
            break


def collected(training: Training) -> None:
    losses = []
    for batch in training.batches():
        losses.append(batch)
        training.steps()
        if training.step == STEPS:
            break


def generator(training: Training) -> None:
    own = random.Random(1)
    for _ in training.batches():
        own.random()
        training.steps()
        if training.step == STEPS:
            break


def epochs(training: Training) -> None:
    for epoch in range(training.progress.get("epoch", 0), 3):
        for _ in training.batches():
            training.steps()
            print(epoch)
            if training.step == STEPS:
                return


def loss_of_micro_batches(training: Training) -> None:
    for batch in training.batches():
        for part in micro_batches(batch):
            loss = part * training.step
        training.steps()
        print(loss)
        for part in polytrain_torch.micro_batches(batch):
            last = part
        print(last)
        if training.step == STEPS:
            break


def loss_of_a_with_block(training: Training) -> None:
    for batch in training.batches():
        with torch.autocast("cpu"), nullcontext():
            loss = batch * training.step
        training.steps()
        print(loss)
        if training.step == STEPS:
            break


def loss_of_a_long_loop(training: Training) -> None:
    """More than 255 instructions."""
    for batch in training.batches():
        for part in micro_batches(batch):
            a = max(abs(part), abs(part + 1), abs(part + 2), abs(part + 3), abs(part + 4), 0)
            b = max(abs(part), abs(part + 1), abs(part + 2), abs(part + 3), abs(part + 4), a)
            c = max(abs(part), abs(part + 1), abs(part + 2), abs(part + 3), abs(part + 4), b)
            d = max(abs(part), abs(part + 1), abs(part + 2), abs(part + 3), abs(part + 4), c)
            e = max(abs(part), abs(part + 1), abs(part + 2), abs(part + 3), abs(part + 4), d)
            loss = e * training.step
        training.steps()
        print(loss)
        if training.step == STEPS:
            break


def loss_that_an_error_leaves_out(training: Training) -> None:
    loss = 0.0
    for batch in training.batches():
        with suppress(ZeroDivisionError):
            loss = batch / training.step
        training.steps()
        print(loss)
        if training.step == STEPS:
            break


def sum_over_micro_batches(training: Training) -> None:
    total = 0
    for batch in training.batches():
        for part in micro_batches(batch):
            total += part
        training.steps()
        if training.step == STEPS:
            break
    print(total)


def loss_of_what_may_be_empty(training: Training) -> None:
    loss = 0
    for batch in training.batches():
        for part in filter(None, [batch]):
            loss = part * training.step
        training.steps()
        print(loss)
        if training.step == STEPS:
            break


def loss_after_the_loop(training: Training) -> None:
    for batch in training.batches():
        loss = batch * training.step
        training.steps()
    print(loss)


def rounds(training: Training) -> None:
    for _ in range(3):
        for batch in training.batches():
            training.steps()
            print(batch)


def endless_rounds(training: Training) -> None:
    """Something that a restart finds ends it."""
    for _ in itertools.count():
        for _ in count(1):
            for batch in training.batches():
                training.steps()
                print(batch)
                if training.step == STEPS:
                    return


def numbered_rounds(training: Training) -> None:
    for number in itertools.count():
        for _ in training.batches():
            training.steps()
            print(number)
        if number == 1:
            return


def not_a_number(training: Training) -> None:
    best = float("nan")
    for _ in training.batches():
        training.steps()
        best = float(str(best))
        if training.step == STEPS:
            break


def limited(training: Training) -> None:
    for batch in islice(training.batches(), 3):
        training.steps()
        print(batch)
    training.look(has_batch=True)


def limited_before(training: Training) -> None:
    some = islice(training.batches(), 3)
    for batch in some:
        training.steps()
        print(batch)
    training.look(has_batch=True)


def limited_by_range(training: Training) -> None:
    for _, batch in zip(range(3), training.batches(), strict=False):
        training.steps()
        print(batch)
    training.look(has_batch=True)


def counted_rounds(training: Training) -> None:
    batches = training.batches()
    for _ in range(STEPS):
        next(batches)
        training.steps()


def nothing_after_the_loop(training: Training) -> None:
    for _ in training.batches():
        training.steps()


@pytest.mark.parametrize(
    "loop",
    [
        plain,
        epochs,
        nothing_after_the_loop,
        loss_of_micro_batches,
        loss_of_a_with_block,
        loss_of_a_long_loop,
        endless_rounds,
        not_a_number,
    ],
)
def test_a_loop_that_carries_nothing_can_go_on(loop: Callable[[Training], None]) -> None:
    assert found_by(loop) is None


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (counter, "count"),
        (attribute, "counter"),
        (numbered, "number"),
        (collected, "losses"),
        (generator, "own"),
        (loss_after_the_loop, "loss"),
        (sum_over_micro_batches, "total"),
        (loss_of_what_may_be_empty, "loss"),
        (loss_that_an_error_leaves_out, "loss"),
        (rounds, "_"),
        (numbered_rounds, "number"),
        (counted_rounds, "_"),
    ],
)
def test_what_a_loop_carries_is_named(loop: Callable[[Training], None], name: str) -> None:
    found = found_by(loop)
    assert found is not None
    assert repr(name) in found


@pytest.mark.parametrize("loop", [limited, limited_before, limited_by_range])
def test_a_loop_that_a_restart_would_begin_to_count_again_is_not_continued(
    loop: Callable[[Training], None],
) -> None:
    assert "takes a number of batches" in str(found_by(loop))


def test_a_number_that_is_in_the_progress_comes_back() -> None:
    assert found_by(counter, count=STEPS) is None
    assert found_by(counter, other=STEPS) is not None


def best_so_far(training: Training) -> None:
    best, which = None, ""
    for _ in training.batches():
        best = min(best or 1.0, 1 / (training.step + 1))
        which = which[:0] + f"of step {training.step}"
        training.steps()
        if training.step == STEPS:
            break


def test_what_else_is_plain_in_the_progress_comes_back_by_its_own_name() -> None:
    which = f"of step {STEPS - 1}"
    assert found_by(best_so_far, best=1 / STEPS, which=which) is None
    assert "'best'" in str(found_by(best_so_far, best=1.0, which=which))
    assert "'which'" in str(found_by(best_so_far, best=1 / STEPS))


class Holder:
    """What training functions have beside numbers: something with attributes."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def added_up(begin: Any, add: Callable[[Any, int], None]) -> Callable[[Training], None]:
    """Return a loop that carries a value, which each step adds to."""

    def loop(training: Training) -> None:
        total = begin()
        for _ in training.batches():
            add(total, training.step)
            training.steps()
            if training.step == STEPS:
                break

    return loop


def rebind_average(shadow: dict[str, torch.Tensor], _: int) -> None:
    shadow["w"] = 0.9 * shadow["w"] + 0.1 * torch.ones(3)


def rebind_meter(meter: Holder, _: int) -> None:
    meter.value = meter.value + torch.tensor(1.0)


def count_one(counts: Any, step: int) -> None:
    counts[step] += 1


def count_last(counts: Any, step: int) -> None:
    counts[-1 - step] += 1


def count_inside(counts: Any, step: int) -> None:
    counts[step][0] += 1


def count_deep(holder: Holder, _: int) -> None:
    while isinstance(holder.value, Holder):
        holder = holder.value
    holder.value += 1


def nested(depth: int) -> Holder:
    return Holder(nested(depth - 1) if depth else 0)


def many_holders() -> list[Holder]:
    return [Holder(0) for _ in range(2000)]


def count_in_holder(holders: list[Holder], step: int) -> None:
    holders[step].value += 1


def append(values: Any, step: int) -> None:
    values.append(step)


def append_batch(values: list[Any], step: int) -> None:
    values.pop(0)
    values.append(torch.ones(2) * step)


def counting(_: None, step: int = 0, seen: list[int] = []) -> None:  # noqa: B006  # it is the case
    seen.append(step)


def move_to_end(values: OrderedDict[str, int], step: int) -> None:
    values.move_to_end("abcdef"[step])


def put_last(values: dict[str, int], step: int) -> None:
    values["abcdef"[step]] = values.pop("abcdef"[step])


def socket_file(content: bytes) -> io.TextIOWrapper:
    """A text file that can't tell its place, as that of a socket or a process."""
    reads, writes = os.pipe()
    with os.fdopen(writes, "wb") as end:
        end.write(content)
    return os.fdopen(reads)


def add_one(counter: Any, at: int) -> None:
    if isinstance(counter, ctypes.Array):
        counter[at] += 1
    else:
        counter.value += 1


def drawn() -> Iterator[int]:
    yield from range(100)


@pytest.mark.parametrize(
    ("begin", "add"),
    [
        (lambda: {"w": torch.zeros(3)}, rebind_average),
        (lambda: Holder(torch.zeros(1)), rebind_meter),
        (lambda: [0.0] * 1000, count_one),
        (lambda: dict.fromkeys(range(1000), 0), count_one),
        (lambda: [[0, 1] for _ in range(50_000)], count_inside),
        (lambda: np.zeros(100_000), count_one),
        (lambda: torch.zeros(100_000), count_last),
        (lambda: torch.zeros(100_000).numpy(), count_last),
        (lambda: bytearray(1000), count_one),
        (lambda: nested(8), count_deep),
        (many_holders, count_in_holder),
        (lambda: deque([1], maxlen=3), append),
        (lambda: [torch.zeros(2) for _ in range(20_000)], append_batch),
        (drawn, lambda values, _: next(values)),
        (lambda: OrderedDict.fromkeys("abcdef", 0), move_to_end),
        (lambda: dict.fromkeys("abcdef", 0), put_last),
        (lambda: io.StringIO("a line\n" * 9), lambda file, _: file.readline()),
        (lambda: io.BytesIO(b"some bytes"), lambda file, _: file.read(1)),
        (lambda: csv.reader(["a,b"] * 9), lambda rows, _: next(rows)),
        (lambda: ContextVar("step", default=0), lambda step, _: step.set(step.get() + 1)),
        (lambda: ctypes.c_int(0), add_one),
        (lambda: (ctypes.c_int * 3)(), lambda counts, _: add_one(counts, 0)),
        (lambda: multiprocessing.Value("i"), add_one),
        (queue.SimpleQueue, lambda values, step: values.put(step)),
        (lambda: socket_file(b"a line\n" * 9), lambda file, _: file.readline()),
    ],
)
def test_nothing_is_too_large_or_too_deep_to_be_compared(
    begin: Callable[[], Any], add: Callable[[Any, int], None]
) -> None:
    # An object that was let go may have lain where another one lies now: so not only once.
    for _ in range(4):
        found = found_by(added_up(begin, add))
        assert found is not None
        assert "'total'" in found or "'begin'" in found


def test_a_function_that_collects_in_its_default_argument_is_named() -> None:
    def loop(training: Training) -> None:
        for _ in training.batches():
            counting(None, training.step)
            training.steps()
            if training.step == STEPS:
                break

    assert "'counting'" in str(found_by(loop))


@pytest.mark.parametrize(
    "data",
    [
        lambda: np.zeros((100, 1 << 17)),  # 100 MB
        lambda: torch.zeros(100, 1 << 17),
        lambda: [torch.ones(2) for _ in range(20_000)],
        lambda: [[1, 2, 3] for _ in range(20_000)],
        lambda: {f"word {number}": number for number in range(50_000)},
        lambda: [(torch.ones(2), number) for number in range(10_000)],
        lambda: torch.utils.data.TensorDataset(torch.ones(1000, 3), torch.ones(1000)),
        lambda: Holder(Holder(torch.nn.Linear(3, 3))),
        lambda: re.compile("a|b"),
        threading.Lock,
        ThreadPoolExecutor,
        lambda: memoryview(b"a"),
    ],
)
def test_data_that_a_loop_reads_are_no_hindrance(data: Callable[[], Any]) -> None:
    assert found_by(added_up(data, lambda values, _: print(type(values)))) is None


def test_an_equal_value_that_is_made_anew_is_no_change() -> None:
    def remake(holder: Holder, _: int) -> None:
        holder.value = [torch.ones(3), np.ones(3), {"a": (1, 2)}]

    holder = Holder()
    remake(holder, 0)
    assert found_by(added_up(lambda: holder, remake)) is None


def numbered_within(training: Training) -> None:
    for _ in range(1):
        for number, _ in enumerate(training.batches()):
            training.steps()
            print(number)
            if training.step == STEPS:
                return


def numbered_by_generator(training: Training) -> None:
    def handed_on() -> Iterator[int]:
        for batch in training.batches():
            assert batch
            yield batch

    for number, _ in enumerate(handed_on()):
        training.steps()
        print(number)
        if training.step == STEPS:
            return


def from_iterator(training: Training) -> None:
    def handed_on() -> Iterator[int]:
        for batch in training.batches():
            assert batch
            yield batch

    batches = handed_on()
    while training.step < STEPS:
        next(batches)
        training.steps()


def test_a_generator_that_hands_batches_on_is_where_they_are() -> None:
    assert found_by(from_iterator) is None


@pytest.mark.parametrize("loop", [numbered, numbered_within, numbered_by_generator])
def test_a_number_of_a_batch_comes_back_by_its_own_name(loop: Callable[[Training], None]) -> None:
    assert found_by(loop, epoch=STEPS - 1) is not None
    assert found_by(loop, number=STEPS - 1) is None


@pytest.mark.parametrize(
    ("mode", "read"),
    [
        ("r", io.TextIOWrapper.readline),
        ("r+", io.TextIOWrapper.readline),
        ("r", next),
        ("rb", lambda file: file.read(1)),
    ],
)
def test_the_place_in_a_file_that_is_read_is_carried(
    mode: str, read: Callable[[Any], object]
) -> None:
    with Path(__file__).open(mode) as file:
        found = found_by(added_up(lambda: file, lambda _, step: read(file)))
    assert found is not None


def test_a_file_that_is_only_held_or_written_is_no_hindrance(tmp_path: Path) -> None:
    with Path(__file__).open() as file:
        assert found_by(added_up(lambda: file, lambda file, _: print(file.name))) is None
    with (tmp_path / "log").open("w") as log:
        assert found_by(added_up(lambda: log, lambda file, step: file.write(f"{step}\n"))) is None
