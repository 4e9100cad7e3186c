"""What a loop carries from step to step outside of its `TrainingState` is found."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

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
            self.loop = Loop(self.frames, {id(self)})
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


def loss_after_the_loop(training: Training) -> None:
    for batch in training.batches():
        loss = batch * training.step
        training.steps()
    print(loss)


def nothing_after_the_loop(training: Training) -> None:
    for _ in training.batches():
        training.steps()


@pytest.mark.parametrize("loop", [plain, epochs, nothing_after_the_loop])
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
    ],
)
def test_what_a_loop_carries_is_named(loop: Callable[[Training], None], name: str) -> None:
    found = found_by(loop)
    assert found is not None
    assert repr(name) in found


def test_a_number_that_is_in_the_progress_comes_back() -> None:
    assert found_by(counter, count=STEPS) is None
    assert found_by(counter, other=STEPS) is not None
