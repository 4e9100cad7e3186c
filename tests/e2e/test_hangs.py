"""Ranks that hang: told apart from those that work, explained by stacks, ended where certain."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from tests.e2e.journals import journal

import polytrain
from polytrain import (
    FailureConfig,
    FailureKind,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.api.trainer import Trainer
from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain.workers.agents import agent_spec
from polytrain_plugins import Member, Offer, World

TIMEOUT_S = 1.5
WORK_S = 2.5 * TIMEOUT_S
LONG_S = 30.0
"""A hang that isn't found ends after this time, so that its test fails."""


def fit(function: Any, quiet: RunConfig, **failure: Any) -> Result:
    """Train on two ranks, of which one may be without progress for `TIMEOUT_S`."""
    config = FailureConfig(**{"hang_timeout_s": TIMEOUT_S, **failure})
    return make_trainer(
        "reference",
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=config),
    ).fit()


def stacks_dumped(quiet: RunConfig) -> list[Mapping[str, Any]]:
    """The journal's lines about ranks that something was wrong with."""
    assert quiet.storage_path is not None
    [run] = Path(quiet.storage_path).iterdir()
    return journal(run, "StacksDumped")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "no progress" in r.message]


def is_rank(rank: int, *, attempt: int = 0) -> bool:
    context = polytrain.get_context()
    return (context.get_world_rank(), context.get_attempt()) == (rank, attempt)


def is_stopped_once() -> None:
    # A rank that is much later than the other would make it suspicious first.
    polytrain.collective.barrier()
    polytrain.report({"attempt": polytrain.get_context().get_attempt()})
    if is_rank(1):
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_is_named_and_replaced(quiet: RunConfig) -> None:
    result = fit(is_stopped_once, quiet, max_failures=1)
    assert result.restarts == 1
    assert result.metrics == {"attempt": 1}
    [found] = stacks_dumped(quiet)
    assert "rank 1: has been stopped by a signal" in found["reason"]
    assert "is_stopped_once" in found["stacks"]["1"]


def rank_0_cannot_be_paused() -> None:
    """It waits for rank 1 in a call that fails when its process is paused, as LightGBM does."""
    import ctypes
    import socket
    import struct

    is_stopped_once()
    if is_rank(0):
        ours, _theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 600, 0))
        ctypes.CDLL(None).recv(ours.fileno(), ctypes.create_string_buffer(1), 1, 0)
        raise ConnectionError("interrupted")


def test_a_rank_that_fails_while_it_is_looked_into_is_not_to_blame(quiet: RunConfig) -> None:
    result = fit(rank_0_cannot_be_paused, quiet, max_failures=1)
    assert result.restarts == 1
    [ended] = journal(result.path, "AttemptEnded")
    assert (ended["failure"]["kind"], ended["failure"]["rank"]) == ("HANG", 1)
    [found] = stacks_dumped(quiet)
    assert set(found["stacks"]) == {"0", "1"}
    assert "is_stopped_once" in found["stacks"]["1"]


def rank_0_waits_for_a_lock() -> None:
    polytrain.collective.barrier()
    polytrain.report({"step": 1})
    lock = threading.Lock()
    if is_rank(0):
        with lock:
            waits_for_itself(lock)
    waits_for_the_others()


def waits_for_itself(lock: threading.Lock) -> None:
    lock.acquire(timeout=LONG_S)


def waits_for_the_others() -> None:
    threading.Event().wait(LONG_S)


def test_a_deadlock_is_explained_by_every_ranks_stack(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError) as caught:
        fit(rank_0_waits_for_a_lock, quiet)
    failure = caught.value.failures[0]
    assert (failure.kind, failure.rank, failure.step) == (FailureKind.HANG, None, 1)
    assert "waits_for_itself" in failure.stacks[0]
    assert "waits_for_the_others" in failure.stacks[1]
    assert re.search("no rank has made progress or spent CPU time for .* s", str(caught.value))
    assert "waits_for_itself" in str(caught.value)
    # One rank may have been without progress a moment before the other.
    assert "waits_for_the_others" in stacks_dumped(quiet)[-1]["stacks"]["1"]


SLOW_PY_SPY = """\
#!{python}
import ctypes, os, sys, time

libc, pid = ctypes.CDLL(None), int(sys.argv[-1])
ATTACH, DETACH = 16, 17
libc.ptrace(ATTACH, pid, 0, 0)
os.waitpid(pid, 0)
time.sleep({seconds})
libc.ptrace(DETACH, pid, 0, 0)
os.execv("{program}", sys.argv)
"""


def test_a_deadlock_is_found_though_its_stacks_take_long_to_read(
    quiet: RunConfig, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading stacks holds a process as a debugger does: for seconds, if it has many symbols."""
    program = shutil.which("py-spy", path=Path(sys.executable).parent)
    slow = tmp_path_factory.mktemp("slow") / "py-spy"
    slow.write_text(
        SLOW_PY_SPY.format(python=sys.executable, seconds=TIMEOUT_S / 2, program=program)
    )
    slow.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: str(slow))
    with pytest.raises(TrainingFailedError) as caught:
        fit(rank_0_waits_for_a_lock, quiet)
    assert caught.value.failures[0].kind is FailureKind.HANG
    assert "waits_for_itself" in caught.value.failures[0].stacks[0]
    assert len(stacks_dumped(quiet)) == 1


def is_noticed() -> bool:
    """Whether the driver has noted in its journal that something is wrong with a rank."""
    run = polytrain.get_context().get_storage().experiment_fs_path
    # Its last line may be half written.
    return "StacksDumped" in Path(run, "journal.jsonl").read_text()


def rank_1_works_until_it_is_noticed() -> None:
    if is_rank(1):
        works(LONG_S, until=is_noticed)
        # Long enough to be noticed once more.
        works(1.5 * TIMEOUT_S)
    polytrain.report({"step": 1})


def rank_1_works_for_long() -> None:
    if is_rank(1):
        works(LONG_S)
    polytrain.report({"step": 1})


def works(seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    end = time.monotonic() + seconds
    for turn in count(1):
        # Seldom: a stack that changes all the time can't be read.
        if time.monotonic() > end or (turn % 10_000 == 0 and until()):
            return


def test_a_rank_that_works_without_progress_is_warned_about_once(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    result = fit(rank_1_works_until_it_is_noticed, quiet)
    assert result.metrics == {"step": 1}
    assert result.restarts == 0
    [message] = warnings(caplog)
    assert re.match(r"Rank 1 has made no progress for [\d.]+ s \(it works: ", message)
    assert "polytrain.heartbeat()" in message
    assert "works (" in message
    [found] = stacks_dumped(quiet)
    assert "rank_1_works_until_it_is_noticed" in found["stacks"]["1"]


def rank_1_works_and_says_so() -> None:
    if is_rank(1):
        for _ in range(10):
            works(WORK_S / 10)
            polytrain.heartbeat()
    polytrain.report({"step": 1})


def test_a_heartbeat_is_progress(quiet: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    assert fit(rank_1_works_and_says_so, quiet).metrics == {"step": 1}
    assert warnings(caplog) == []
    assert stacks_dumped(quiet) == []


def rank_1_leaves_early() -> None:
    polytrain.report({"step": 1})
    polytrain.report({"step": 2})
    if is_rank(0):
        waits_for_the_others()


def test_a_rank_that_has_left_while_others_wait_is_named(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError) as caught:
        fit(rank_1_leaves_early, quiet)
    failure = caught.value.failures[0]
    assert (failure.kind, failure.rank) == (FailureKind.HANG, 1)
    left = "rank 1: left the training function at step 2 while rank 0 waits in it"
    assert str(failure).startswith(left)
    assert "waits_for_the_others" in failure.stacks[0]


def test_a_rank_that_works_is_killed_where_the_user_wants_that(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError) as caught:
        fit(rank_1_works_for_long, quiet, hang_action="kill")
    failure = caught.value.failures[0]
    assert (failure.kind, failure.rank) == (FailureKind.HANG, 1)
    assert "rank_1_works_for_long" in failure.stacks[1]


def both_wait_a_while() -> None:
    threading.Event().wait(WORK_S)
    polytrain.report({"step": 1})


def both_wait_until_it_is_noticed() -> None:
    end = time.monotonic() + LONG_S
    while time.monotonic() < end and not is_noticed():
        threading.Event().wait(TIMEOUT_S / 10)
    polytrain.report({"step": 1})


@pytest.mark.parametrize(
    ("function", "action", "timeout_s"),
    [(both_wait_until_it_is_noticed, "warn", TIMEOUT_S), (both_wait_a_while, "kill", None)],
)
def test_nothing_is_killed_where_the_user_doesnt_want_that(
    quiet: RunConfig,
    caplog: pytest.LogCaptureFixture,
    function: Callable[[], None],
    action: Literal["warn", "kill"],
    timeout_s: float | None,
) -> None:
    result = fit(function, quiet, hang_action=action, hang_timeout_s=timeout_s)
    assert result.metrics == {"step": 1}
    assert bool(warnings(caplog)) == (timeout_s is not None)


@dataclass(frozen=True, kw_only=True)
class Stuck(Reference):
    """A backend of which rank 1 gets stuck at some point."""

    where: str = ""
    name: ClassVar[str] = "reference"

    def engine(self) -> ReferenceEngine:
        return StuckEngine(self, self.where)


class StuckEngine(ReferenceEngine):
    def __init__(self, options: Reference, where: str) -> None:
        super().__init__(options)
        self._where = where

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        self._stick("offering", me.rank)
        with super().offering(me) as offer:
            yield offer

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        with super().joined(world):
            yield
            self._stick("leaving", world.me.rank)

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        summed = super().sum_over_ranks(values, world)
        self._stick("joining", world.me.rank)
        return summed

    def _stick(self, where: str, rank: int) -> None:
        if (where, rank) == (self._where, 1):
            waits_for_the_others()


def fit_stuck(where: str, quiet: RunConfig) -> Result:
    config = FailureConfig(rendezvous_timeout_s=TIMEOUT_S)
    return Trainer(
        Stuck(where=where),
        both_wait_a_while,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=config),
    ).fit()


@pytest.mark.parametrize(
    ("where", "what"),
    [("offering", "not made an offer to the others"), ("joining", "not joined the others")],
)
def test_a_rank_that_doesnt_meet_the_others_is_named(
    quiet: RunConfig, where: str, what: str
) -> None:
    with pytest.raises(TrainingFailedError) as caught:
        fit_stuck(where, quiet)
    failure = caught.value.failures[0]
    assert (failure.kind, failure.rank) == (FailureKind.STARTUP, 1)
    assert str(failure) == f"rank 1: has {what} in time (rendezvous_timeout_s=1.5)"
    assert "waits_for_the_others" in failure.stacks[1]
    assert set(failure.stacks) == {0, 1}


def test_a_rank_that_doesnt_leave_is_killed_and_the_run_has_succeeded(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_spec, "LEAVE_TIMEOUT_S", TIMEOUT_S)
    with caplog.at_level(logging.WARNING):
        result = fit_stuck("leaving", quiet)
    assert result.metrics == {"step": 1}
    assert result.restarts == 0
    # On a busy machine the other one may take as long, though nothing holds it.
    messages = [record.message for record in caplog.records if "has not ended" in record.message]
    assert ["waits_for_the_others" in each for each in messages if "Rank 1 has" in each] == [True]
