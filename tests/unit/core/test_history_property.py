"""A run's journal under random deaths: drivers that are killed anywhere, fenced off, started over.

The model is what somebody would write down who watches the run and believes only what has reached
the disk. What a driver has synced survives its machine; of the rest the file may end at any byte.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polytrain.common.events import AgentsPlaced, Reported
from polytrain.policy.failure import FailurePolicy
from polytrain.run.actions import Conclude
from polytrain.run.history import read_history
from polytrain.run.journal import JOURNAL, Journal
from polytrain.run.ledger import Ledger
from polytrain.run.states import State, Training
from polytrain.run.transition import Transition
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
        self.known: list[tuple[int, Known | None]] = [(0, None)]
        """Size of the journal → what one knows who has read so much of it."""

        self.synced = 0

    def teardown(self) -> None:
        for journal in (*self.fenced_off, *filter(None, [self.driver])):
            journal.__exit__(None, None, None)
        shutil.rmtree(self.directory)

    @property
    def now(self) -> Known:
        """What is known now, of a run that has been opened."""
        known = self.known[-1][1]
        assert known is not None
        return known

    def wrote(self, known: Known | None, *, synced: bool = False) -> None:
        """The driver has written something from which this follows."""
        size = self.file.stat().st_size
        self.known.append((size, known))
        if synced:
            self.synced = size

    @precondition(lambda self: self.driver is None)
    @rule(anew=st.booleans(), options=st.integers(0, 3))
    def a_driver_begins(self, anew: bool, options: int) -> None:
        self.leases += 1
        before = self.known[-1][1]
        self.driver = Journal(
            Location.of(self.directory, retry_s=0).open(), token=self.leases, ledger=Ledger()
        )
        anew = anew or before is None
        identity = {"options": options}
        self.driver.opened(anew=anew, identity=identity, world_size=1)
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
        self.driver.launched(attempt=now.launches, step=self.step, start=None, world_size=2)
        history = tuple(told for told in now.history if told[0] <= self.step)
        self.wrote(replace(now, history=history, launches=now.launches + 1))

    @precondition(lambda self: self.step is not None)
    @rule(text=st.text(max_size=5))
    def rank_0_reports(self, text: str) -> None:
        assert self.driver is not None
        assert self.step is not None
        self.step += 1
        metrics = self.new_metrics(text)
        self.driver.reported(Reported(attempt=0, rank=0, step=self.step, metrics=metrics))
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
        self.driver.transition(
            AgentsPlaced(nodes=("node",)), Transition(state=TRAINING, reason="é\n")
        )
        self.wrote(self.now)

    @precondition(lambda self: self.driver is not None)
    @rule(succeeded=st.booleans())
    def the_run_ends(self, succeeded: bool) -> None:
        assert self.driver is not None
        self.driver.concluded(Conclude(succeeded=succeeded, reason="so it is"))
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
                journal.launched(attempt=7, step=step, start=None, world_size=2)
            case "reported":
                metrics = self.new_metrics("late")
                journal.reported(Reported(attempt=0, rank=0, step=step, metrics=metrics))
            case "concluded":
                journal.concluded(Conclude(succeeded=True, reason="late"))
        self.wrote(self.known[-1][1])

    @precondition(lambda self: self.leases > 0)
    @rule(lost=st.integers(0, 600))
    def the_machine_crashes(self, lost: int) -> None:
        """All drivers were on it."""
        for journal in (*self.fenced_off, *filter(None, [self.driver])):
            journal.__exit__(None, None, None)
        self.driver = self.step = None
        self.fenced_off.clear()
        end = max(self.synced, self.file.stat().st_size - lost)
        os.truncate(self.file, end)
        # A line that lacks nothing but its end is one.
        self.known = [(size, known) for size, known in self.known if size - 1 <= end]

    def new_metrics(self, text: str) -> dict[str, Any]:
        self.reports += 1
        return {"number": self.reports, "nested": {"text": text}}

    @invariant()
    def the_journal_tells_what_is_known(self) -> None:
        known = self.known[-1][1]
        told = read_history(self.file.read_bytes().decode() if self.file.exists() else "")
        if known is None:
            assert told is None
            return
        assert told is not None
        assert tuple(told.history) == known.history
        assert (told.launches, told.succeeded) == (known.launches, known.succeeded)
        assert (told.identity, told.since_token) == (known.identity, known.since_token)
        # Neither gaps nor duplicates, and nothing is lost that a checkpoint stands for.
        steps = [step for step, _ in told.history]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= known.committed


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
