"""A run's journal under random deaths: drivers that are killed anywhere, fenced off, started over.

The model is what somebody would write down who watches the run and believes only what has reached
the disk. What a driver has synced survives its machine; of the rest the file may end at any byte,
and drafts may be gone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.sweeps import examples
from tests.unit.record.lines import write_transition

from polytrain.events.attempt import AgentsPlaced, Reported
from polytrain.policy.failure import FailurePolicy
from polytrain.record.entries import Launched, Opened, RunConcluded
from polytrain.record.history import JOURNAL, RunHistory, read_history
from polytrain.record.journal import Journal
from polytrain.run.states import State, Training, Transition
from polytrain.storage.location import Location

MEMORY = "/dev/shm"
"""A file system that takes no time to sync."""

TRAINING = State(world_size=1, policy=FailurePolicy(), phase=Training())


@dataclass(frozen=True)
class Known:
    """What an onlooker has written down."""

    identity: Any = None
    since_token: int = 0
    launches: int = 0
    history: tuple[tuple[int, Any], ...] = ()
    committed: int = 0
    """Step of the newest checkpoint."""

    succeeded: bool | None = None


def as_known(expected: RunHistory | None, known: Known | None) -> Known | None:
    """What a journal tells; of the checkpoints it doesn't."""
    if expected is None:
        return None
    return Known(
        identity={"options": expected.identity["options"]},
        since_token=expected.since_token,
        launches=expected.ledger.launches,
        history=tuple(expected.reports.since(0)),
        committed=0 if known is None else known.committed,
        succeeded=expected.succeeded,
    )


class Run(RuleBasedStateMachine):
    """A run, its drivers one after another, and what becomes of their lines."""

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="polytrain-test-", dir=MEMORY))
        self.file = self.directory / JOURNAL
        self.leases = self.reports = 0
        self.driver: Journal | None = None
        self.step: int | None = None
        """What its trainers have reported last; None while there are none."""

        self.fenced_off: list[Journal] = []
        self.known: list[Known | None] = [None]
        """What one knew after each line since the last sync."""

        self.synced = 0
        """Size of the journal then."""

    def teardown(self) -> None:
        for journal in (*self.fenced_off, *filter(None, [self.driver])):
            journal.__exit__(None, None, None)
        shutil.rmtree(self.directory)

    @property
    def now(self) -> Known:
        """What is known now, of a run that has been opened."""
        known = self.known[-1]
        assert known is not None
        return known

    def wrote(self, known: Known | None, *, synced: bool = False) -> None:
        """The driver has written something from which this follows."""
        self.known.append(known)
        if synced:
            self.known = [known]
            self.synced = self.file.stat().st_size

    @precondition(lambda self: self.driver is None)
    @rule(anew=st.booleans(), options=st.integers(0, 3))
    def a_driver_begins(self, anew: bool, options: int) -> None:
        self.leases += 1
        before = self.known[-1]
        self.driver = Journal(Location.of(self.directory, retry_s=0).open(), token=self.leases)
        anew = anew or before is None
        identity = {"options": {"n": options}}
        self.driver.write(Opened(anew=anew, identity=identity, world_size=1))
        if anew:
            known = Known(identity=identity, since_token=self.leases)
        else:
            known = replace(self.now, identity=identity, succeeded=None)
        self.wrote(known, synced=True)

    @precondition(lambda self: self.driver is not None)
    @rule()
    def trainers_start(self) -> None:
        assert self.driver is not None
        now = self.now
        self.step = now.committed
        self.driver.write(Launched(attempt=now.launches, step=self.step, start=None, world_size=2))
        history = tuple(each for each in now.history if each[0] <= self.step)
        self.wrote(replace(now, history=history, launches=now.launches + 1))

    @precondition(lambda self: self.step is not None)
    @rule(text=st.text(max_size=5), count=st.sampled_from([1, 1, 1, 17]))
    def rank_0_reports(self, text: str, count: int) -> None:
        assert self.driver is not None
        assert self.step is not None
        for _ in range(count):
            self.step += 1
            metrics = self.new_metrics(text)
            self.driver.report(Reported(attempt=0, rank=0, step=self.step, metrics=metrics))
            self.wrote(replace(self.now, history=(*self.now.history, (self.step, metrics))))

    @precondition(lambda self: self.step is not None)
    @rule()
    def a_checkpoint_is_committed(self) -> None:
        assert self.driver is not None
        assert self.step is not None
        self.driver.sync()
        self.wrote(replace(self.now, committed=self.step), synced=True)

    @precondition(lambda self: self.driver is not None)
    @rule()
    def the_machine_goes_on(self) -> None:
        assert self.driver is not None
        write_transition(
            self.driver, AgentsPlaced(nodes=("node",)), Transition(state=TRAINING, reason="é\n")
        )
        self.wrote(self.now)

    @precondition(lambda self: self.driver is not None)
    @rule(succeeded=st.booleans())
    def the_run_ends(self, succeeded: bool) -> None:
        assert self.driver is not None
        self.driver.write(RunConcluded(stopped=None, succeeded=succeeded, reason="so it is"))
        self.wrote(replace(self.now, succeeded=succeeded), synced=True)
        self.driver.__exit__(None, None, None)
        self.driver = self.step = None

    @precondition(lambda self: self.driver is not None)
    @rule()
    def the_driver_is_killed(self) -> None:
        """Its lines are the kernel's by then."""
        assert self.driver is not None
        self.driver.__exit__(None, None, None)
        self.driver = self.step = None

    @precondition(lambda self: self.driver is not None)
    @rule()
    def the_driver_is_taken_for_dead(self) -> None:
        assert self.driver is not None
        self.fenced_off.append(self.driver)
        self.driver = self.step = None

    @precondition(lambda self: self.fenced_off and self.driver is not None)
    @rule(what=st.sampled_from(["launched", "reported", "concluded"]), step=st.integers(0, 9))
    def a_fenced_off_driver_writes(self, what: str, step: int) -> None:
        journal = self.fenced_off[-1]
        match what:
            case "launched":
                journal.write(Launched(attempt=7, step=step, start=None, world_size=2))
            case "reported":
                metrics = self.new_metrics("late")
                journal.report(Reported(attempt=0, rank=0, step=step, metrics=metrics))
            case "concluded":
                journal.write(RunConcluded(stopped=None, succeeded=True, reason="late"))
        self.wrote(self.known[-1])

    @precondition(lambda self: self.leases > 0)
    @rule(lost=st.integers(0, 600), are_drafts_lost=st.booleans())
    def the_machine_crashes(self, lost: int, are_drafts_lost: bool) -> None:
        """All drivers were on it."""
        for journal in (*self.fenced_off, *filter(None, [self.driver])):
            journal.__exit__(None, None, None)
        self.driver = self.step = None
        self.fenced_off.clear()
        end = max(self.synced, self.file.stat().st_size - lost)
        if end < self.file.stat().st_size or are_drafts_lost:
            for drafts in self.directory.glob("*.drafts-*"):
                drafts.unlink()
        os.truncate(self.file, end)
        found = as_known(self.read(), self.known[-1])
        assert found in self.known
        self.known = self.known[: len(self.known) - self.known[::-1].index(found)]

    def read(self) -> RunHistory | None:
        return read_history(Location.of(self.directory).open().read_log(JOURNAL))

    def new_metrics(self, text: str) -> dict[str, Any]:
        self.reports += 1
        metrics = {"number": self.reports, "nested": {"text": text}}
        return {**metrics, "loss": 1 / self.reports} if self.reports % 3 else metrics

    @invariant()
    def the_journal_tells_what_is_known(self) -> None:
        known = self.known[-1]
        found = self.read()
        if known is None:
            assert found is None
            return
        assert found is not None
        assert as_known(found, known) == known
        # Neither gaps nor duplicates, and nothing is lost that a checkpoint stands for.
        steps = found.reports.steps().tolist()
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= known.committed


TestRun = pytest.mark.sweep(Run.TestCase)
TestRun.settings = settings(
    max_examples=examples(200, in_test=50), stateful_step_count=40, deadline=None
)
