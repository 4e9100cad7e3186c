"""Handles ranks that don't join, hang, delay the others or don't leave, and shows their stacks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from polytrain.config.configs import FailureConfig
from polytrain.errors import Failure, stacks_text
from polytrain.events.attempt import (
    STACKS_WITHIN_S,
    Died,
    Done,
    DrainWanted,
    Event,
    Exited,
    Failed,
    HealthEvent,
    Joined,
    LeaveTimedOut,
    Load,
    Purpose,
    Stacks,
    Unkillable,
)
from polytrain.policy.hang_detector import DumpStacks, FailAttempt, HangDetector, WarnUser
from polytrain.policy.stragglers import Straggler, StragglerDetector
from polytrain.record.entries import (
    LoadMeasured,
    ProcessesRequested,
    StacksDumped,
    StragglerFound,
)
from polytrain.record.journal import Journal
from polytrain.run.background_tasks import BackgroundTasks
from polytrain.run.deadlines import Deadline, Deadlines
from polytrain.run.requests import RemoteRequests
from polytrain.run.states import State
from polytrain.workers.agents.calls import ReadStacks
from polytrain.workers.driver.group import WorkerGroup

_HINT = (
    "polytrain.heartbeat() shows that a rank makes progress. FailureConfig(hang_timeout_s=…, "
    "hang_action=…) decides what happens to a rank that makes none."
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class HealthMonitor:
    """Monitors the ranks of each attempt."""

    config: FailureConfig
    group: WorkerGroup
    journal: Journal
    deadlines: Deadlines
    _hang_detector: HangDetector | None = None
    _straggler_detector: StragglerDetector | None = None
    _loads: dict[int, Load] = field(default_factory=dict)
    """Rank → its load in its last window."""

    _moved: set[int] = field(default_factory=set)
    """Stragglers that were moved to another agent."""

    def launched(self, attempt: int, world_size: int) -> None:
        """Note that an attempt starts."""
        if (
            self._straggler_detector is not None
            and self._straggler_detector.world_size != world_size
        ):
            # With another world size, ranks train on other rows.
            self._moved.clear()
        self._loads.clear()
        self._straggler_detector = StragglerDetector(attempt=attempt, world_size=world_size)
        self._hang_detector = HangDetector(
            config=self.config,
            attempt=attempt,
            world_size=world_size,
            hosts=[member.host for member in self.group.members],
        )
        self._hang_detector.launched(now=time.monotonic())
        self.look_soon()

    def look_soon(self) -> None:
        """Have `look` called when all events that have arrived are handled."""
        self.deadlines.set(Deadline.RANKS, time.monotonic())

    def may_have_caused(self, event: Event) -> bool:
        """Return whether a stack dump may have caused a rank's failure.

        The dump pauses ranks, and a rank may also fail because another was stopped.
        """
        hang_detector = self._hang_detector
        if (
            hang_detector is None
            or not hang_detector.may_harm
            or not isinstance(event, Failed | Died | Exited)
        ):
            return False
        return event.attempt == hang_detector.attempt

    def take(self, event: HealthEvent | Joined | Done) -> DrainWanted | None:
        """Note a health event; return the drain to request, if any."""
        if isinstance(event, Load):
            return self._take_load(event)
        hang_detector = self._hang_detector
        if hang_detector is not None:
            before = hang_detector.has_started
            hang_detector.take(event, now=time.monotonic())
            self.look_soon()
            if hang_detector.has_started and not before:
                self.journal.write(ProcessesRequested(attempt=hang_detector.attempt))
        if isinstance(event, LeaveTimedOut):
            self._warn(
                event.attempt,
                f"rank {event.rank} has not ended within {event.after_s:g} s after every rank was "
                "done, and was killed",
                {event.rank: event.stacks},
            )
        if isinstance(event, Unkillable):
            host = self.group.members[event.rank].host
            logger.warning(
                "Process %d of rank %d on %s has not ended within %g s after it was killed, and "
                "isn't waited for any more. Such a process waits in the kernel for a device or a "
                "file server, and holds its GPU until that answers: look at the host's kernel log, "
                "and restart the host if it stays.",
                event.pid,
                event.rank,
                host,
                event.after_s,
            )
        return None

    def look(self, state: State) -> Failure | None:
        """Check the ranks; return the failure if one ends the attempt."""
        if self._hang_detector is None:
            return None
        finding = self._hang_detector.look(state.status, now=time.monotonic())
        self.deadlines.set(Deadline.RANKS, self._hang_detector.deadline)
        match finding:
            case DumpStacks(pausing=pausing):
                self.group.call(ReadStacks(attempt=state.attempt, pausing=pausing))
            case WarnUser(reason=reason, stacks=stacks):
                self._warn(state.attempt, reason, stacks, hint=_HINT)
            case FailAttempt(failure=failure, stacks=stacks):
                self._note_stacks(state.attempt, str(failure), stacks)
                return failure
        return None

    def _take_load(self, load: Load) -> DrainWanted | None:
        detector = self._straggler_detector
        if detector is None or load.attempt != detector.attempt:
            return None
        self._loads[load.rank] = load
        found = detector.take(load)
        shares = detector.shares(load.window)
        if shares is not None:
            loads = [self._loads[rank] for rank in range(len(shares))]
            self.journal.write(
                LoadMeasured(
                    attempt=load.attempt,
                    window=load.window,
                    busy=shares,
                    cpu=[each.cpu for each in loads],
                    memory=[each.memory for each in loads],
                    gpus=_gpus(loads),
                )
            )
        reasons = {its.rank: self._report_straggler(its, load.attempt) for its in found}
        if self.config.stragglers != "replace" or not reasons.keys() - self._moved:
            return None
        moved = frozenset(reasons.keys() - self._moved)
        self._moved |= moved
        reason = "; ".join(reasons[rank] for rank in sorted(moved))
        return DrainWanted(purpose=Purpose.MOVE, reason=reason, ranks=moved)

    def _report_straggler(self, straggler: Straggler, attempt: int) -> str:
        """Report a straggler to observers and the log; return the reason."""
        host = self.group.members[straggler.rank].host
        reason = straggler.reason(host=host, window_s=self.config.straggler_window_s)
        self.journal.write(
            StragglerFound(attempt=attempt, rank=straggler.rank, host=host, reason=reason)
        )
        if self.config.stragglers == "report":
            hint = "FailureConfig(stragglers='replace') replaces it by a standby."
        elif straggler.rank in self._moved:
            hint = "It has been moved before, so its work may be the cause, not its node."
        else:
            hint = "A standby replaces it after the next checkpoint."
        logger.warning("%s", _sentences(reason, hint))
        return reason

    def _warn(
        self, attempt: int, reason: str, stacks: Mapping[int, str], *, hint: str = ""
    ) -> None:
        self._note_stacks(attempt, reason, stacks)
        text = stacks_text(stacks)
        logger.warning("%s Stacks:\n%s", _sentences(reason, hint), text)

    def _note_stacks(self, attempt: int, reason: str, stacks: Mapping[int, str]) -> None:
        self.journal.write(StacksDumped(attempt=attempt, reason=reason, stacks=stacks))


@dataclass(slots=True, kw_only=True)
class StacksAnswers:
    """Collects the ranks' stacks for requests that arrive while an attempt runs."""

    group: WorkerGroup
    remote_requests: RemoteRequests
    background_tasks: BackgroundTasks
    deadlines: Deadlines
    _requests: list[str] = field(default_factory=list)
    """Requests that aren't answered yet."""

    _stacks: dict[int, str] = field(default_factory=dict)
    _attempt: int = -1
    _world_size: int = 0

    def wanted(self, request: str, *, attempt: int, world_size: int) -> None:
        """Ask the ranks of an attempt, unless they are being asked already."""
        is_asking = bool(self._requests) and self._attempt == attempt
        self._requests.append(request)
        if is_asking:
            return
        self._attempt, self._world_size = attempt, world_size
        self._stacks.clear()
        self.group.call(ReadStacks(attempt=attempt, pausing=False))
        self.deadlines.set(Deadline.STACKS, time.monotonic() + STACKS_WITHIN_S)

    def take(self, stacks: Stacks) -> None:
        """Note a rank's stacks, and answer once all have come; ignore those of other attempts."""
        if self._requests and stacks.attempt == self._attempt:
            self._stacks[stacks.rank] = stacks.text
            if len(self._stacks) == self._world_size:
                self.answer()

    def answer(self) -> None:
        """Answer all requests with the stacks that have come."""
        stacks = dict(sorted(self._stacks.items()))
        for request in self._requests:
            answer = partial(self.remote_requests.answer, request, {"stacks": stacks})
            self.background_tasks.submit(answer)
        self._requests.clear()
        self.deadlines.set(Deadline.STACKS, None)


def _gpus(loads: Sequence[Load]) -> Sequence[Sequence[tuple[float | None, int | None]]]:
    """Return the use of each rank's GPUs; empty if nothing is known of any."""
    uses = [[(gpu.busy, gpu.memory) for gpu in each.gpus] for each in loads]
    return uses if any(use != (None, None) for its in uses for use in its) else ()


def _sentences(reason: str, hint: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}. {hint}".strip()
