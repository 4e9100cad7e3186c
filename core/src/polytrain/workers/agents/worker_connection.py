"""Connects an agent to one attempt's worker process: its messages, reports and health."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from polytrain.checkpoint.parts import StagedPart
from polytrain.events.attempt import CopyRefused, KeepsNothing, KeepsState
from polytrain.events.output import BarMoved, Output, OutputRoute
from polytrain.observe.gpu_meter import GpuMeter
from polytrain.observe.probes import PeriodicProbe, Probe, ProgressProbe, UtilizationProbe
from polytrain.observe.stacks import stacks_of
from polytrain.workers.agents.calls import AgentEvent
from polytrain.workers.agents.kept_end import KeptEnd
from polytrain.workers.processes.channel import Message, ReportReader, Ring, calls_every_s
from polytrain.workers.processes.child import Child
from polytrain.workers.session.job import LaunchOrder
from polytrain.workers.session.messages import is_of_survivor, to_event, to_part, to_written_part

_RANKS_WITH_BARS = 8
"""Ranks whose bars are shown while they move: a terminal has no room for more."""


class WorkerConnection:
    """The connection to one worker process. All methods run on the agent's event loop."""

    def __init__(
        self,
        order: LaunchOrder,
        rank: int,
        *,
        on_event: Callable[[AgentEvent], None],
        on_part: Callable[[StagedPart], None],
        on_imports: Callable[[Message], None],
        on_written: Callable[[StagedPart, bool, bool], None],
        on_unwritten: Callable[[int, str], None],
        hang_timeout_s: float | None,
        straggler_window_s: float | None,
        gpu_meter: GpuMeter,
        passes_all_reports: bool,
        route: OutputRoute,
    ) -> None:
        """
        Args:
            order: the order of the attempt.
            rank: the worker process's rank.
            on_event: called with the worker process's events and output.
            on_part: called with each part of a checkpoint that it has staged.
            on_imports: called with the message of the modules that it has imported.
            on_written: called with the state that it has written as a survivor, and whether that is
                the checkpoint of a report.
            on_unwritten: called with the number of a checkpoint that it can't write as a survivor,
                and with the reason.
            hang_timeout_s: seconds without progress after which an event is sent; None for never.
            straggler_window_s: seconds over which its load is measured; None for never.
            gpu_meter: reads the use of its GPUs.
            passes_all_reports: whether all reports that are read together are passed on, and not
                only the newest.
            route: how its output gets to the user.

        Raises:
            OSError: the system has no descriptors left.
        """
        self.order = order
        self.child = Child(
            on_message=self._take,
            on_output=self._emit_output,
            one_pipe=route.one_pipe,
            on_bars=self._emit_bars if route.shows_bars and rank < _RANKS_WITH_BARS else None,
        )
        self.kept: KeptEnd | None = None
        """Its kept states, which outlive it; None if it keeps none. The agent closes it."""

        self.copies: dict[int, tuple[StagedPart, bool, bool]] = {}
        """Number → copy of its state, whether that is the checkpoint of a report, and whether steps
        were taken since the last report. The newest is the last."""

        self.has_finished = False
        """Whether the training has returned, or stopped after a checkpoint as requested."""

        self._rank = rank
        self._on_event = on_event
        self._on_part = on_part
        self._on_imports = on_imports
        self._on_written = on_written
        self._on_unwritten = on_unwritten
        self._hang_timeout_s = hang_timeout_s
        self._straggler_window_s = straggler_window_s
        self._gpu_meter = gpu_meter
        self._passes_all_reports = passes_all_reports
        self._watches: list[PeriodicProbe] = []
        self._reports = ReportReader(Ring(self.child.page.reports))
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def attempt(self) -> int:
        """The worker process's attempt."""
        return self.order.attempt

    def discard(self) -> None:
        """Close everything: no process was forked."""
        self._reports.close()
        self.child.discard()

    def close(self) -> None:
        """Read what the ended worker process has sent, and close the connection."""
        self.child.read_messages()
        self._look_for_reports()
        self._look_away()
        self._cancel_look()
        self._reports.close()
        self.child.close()

    async def stacks(self, pausing: bool) -> str:
        """Return the stacks of the worker process, within a bounded time.

        Args:
            pausing: whether the process may be paused for this.
        """
        if not self.child.pid:
            return "not known: it has not been forked yet"
        # Duplicate the descriptor: the page may be closed before the answer arrives.
        descriptor = os.dup(self.child.page.descriptor)
        try:
            loop = asyncio.get_running_loop()
            look = partial(stacks_of, self.child.pid, descriptor, pausing=pausing)
            with self._unwatched():
                return await loop.run_in_executor(None, look)
        finally:
            os.close(descriptor)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Pause the watches, which would take the reader of stacks for a debugger.

        At the end they check once, so that progress made meanwhile is reported before the stacks.
        """
        watches = self._watches
        for watch in watches:
            watch.pause()
        try:
            yield
        finally:
            for watch in watches:
                watch.resume()

    def _watch_over(self) -> None:
        """Start to report the worker process's load, and when it makes no progress."""
        attempt, rank = self.attempt, self._rank
        now = asyncio.get_running_loop().time()
        probes: list[Probe] = []
        if (timeout_s := self._hang_timeout_s) is not None:
            probes.append(ProgressProbe(attempt=attempt, rank=rank, timeout_s=timeout_s, now=now))
        if (window_s := self._straggler_window_s) is not None:
            probes.append(
                UtilizationProbe(
                    attempt=attempt,
                    rank=rank,
                    window_s=window_s,
                    now=now,
                    gpu_meter=self._gpu_meter,
                )
            )
        page, pid = self.child.page, self.child.pid
        self._watches = [
            PeriodicProbe(probe, page=page, pid=pid, tell=self._on_event) for probe in probes
        ]

    def _look_away(self) -> None:
        for watch in self._watches:
            watch.close()

    def _look_for_reports(self) -> None:
        self._pass_reports_on(self._reports.take())

    def _pass_reports_on(self, reports: Sequence[Message]) -> None:
        """Pass on reports: all of them, or only the newest."""
        events = [to_event(each, attempt=self.attempt, rank=self._rank) for each in reports]
        for event in events if self._passes_all_reports else events[-1:]:
            self._on_event(event)

    def _take_call(self) -> None:
        self._cancel_look()
        # The worker process relies on this read: until then it writes reports without calling.
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(calls_every_s(self._rank), self._look_for_reports)

    def _cancel_look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()

    def _take(self, message: Message) -> None:
        self._pass_reports_on(self._reports.before_message())
        if message[0] == "imported":
            self._on_imports(message)
            return
        if is_of_survivor(message):
            self._take_of_survivor(message)
            return
        if message == ["reports"]:
            self._take_call()
            return
        if message[0] == "raised":
            # Pass on earlier output first: it may hold the reason.
            self.child.read_output()
        if message[0] == "joined":
            self._watch_over()
        if message[0] in ("done", "raised"):
            self._look_away()
        if message[0] in ("done", "drained"):
            self.has_finished = True
        self._on_event(to_event(message, attempt=self.attempt, rank=self._rank))
        if message[0] == "staged":
            self._on_part(to_part(message, attempt_id=self.order.attempt_id, rank=self._rank))

    def _take_of_survivor(self, message: Message) -> None:
        match message:
            case ["keeps", kept, capacity, asking, size]:
                self.kept = KeptEnd.opened(self.child.pid, kept, capacity, asking)
                if self.kept is not None:
                    self._on_event(KeepsState(attempt=self.attempt, rank=self._rank, size=size))
            case ["keeps_nothing", why]:
                self._on_event(KeepsNothing(attempt=self.attempt, rank=self._rank, reason=why))
            case ["written" | "copied" as tag, *_, is_report, is_ahead]:
                attempt_id = self.order.attempt_id
                part = to_written_part(message, attempt_id=attempt_id, rank=self._rank)
                if tag == "copied":
                    self.copies[part.checkpoint] = part, is_report, is_ahead
                else:
                    self._on_written(part, is_report, is_ahead)
            case ["uncopied", number]:
                self.copies.pop(number, None)
            case ["uncopyable", number, why, is_last]:
                refused = CopyRefused(
                    attempt=self.attempt,
                    rank=self._rank,
                    number=number,
                    reason=why,
                    is_last=is_last,
                )
                self._on_event(refused)
            case ["unwritten", checkpoint, why]:
                self._on_unwritten(checkpoint, why)

    def _emit_output(self, stream: str, text: str) -> None:
        self._on_event(Output(attempt=self.attempt, rank=self._rank, stream=stream, text=text))

    def _emit_bars(self, rows: tuple[str, ...]) -> None:
        self._on_event(BarMoved(attempt=self.attempt, rank=self._rank, rows=rows))
