"""Connects an agent to one attempt's worker process: its messages, reports, health and states."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgpack

from polytrain.events.attempt import CopyRefused, KeepsNothing, KeepsState
from polytrain.events.output import BarMoved, Output
from polytrain.linux.kept_states import KeptState, KeptStates
from polytrain.linux.nvidia_gpus import GpuMeter
from polytrain.observe.probes import PeriodicProbe, Probe, ProgressProbe, UtilizationProbe
from polytrain.observe.stacks import stacks_of
from polytrain.workers.agents.agent_spec import AgentSpec
from polytrain.workers.agents.calls import WriteState
from polytrain.workers.agents.sent_copies import Copy
from polytrain.workers.processes.channel import Message, ReportReader, Ring, calls_every_s
from polytrain.workers.processes.child import Child
from polytrain.workers.processes.loop_thread import in_daemon_thread
from polytrain.workers.session.job import LaunchOrder
from polytrain.workers.session.messages import to_event, to_part

if TYPE_CHECKING:
    from polytrain.workers.agents.agent import Agent


class KeptEnd:
    """The small states that a worker process keeps, and the pipe that asks it for the whole."""

    def __init__(self, states: KeptStates, asking: int) -> None:
        self._states = states
        self._asking = asking
        self._request: int | None = None

    @classmethod
    def opened(cls, pid: int, kept: int, capacity: int, asking: int) -> KeptEnd | None:
        """Open both by their numbers in the process; return None if that isn't possible.

        Args:
            pid: the process, as this one knows it.
            kept: descriptor of the memory in the process.
            capacity: maximum bytes of a state.
            asking: descriptor of the pipe in the process.
        """
        own: list[int] = []
        try:
            own.append(os.open(f"/proc/{pid}/fd/{kept}", os.O_RDWR | os.O_CLOEXEC))
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            own.append(os.open(f"/proc/{pid}/fd/{asking}", flags))
            return cls(KeptStates(own[0], capacity), own[1])
        except (OSError, ValueError):
            # It has ended already, or its namespace hides it.
            for descriptor in own:
                os.close(descriptor)
            return None

    def read(self) -> tuple[KeptState, ...]:
        """Return the whole small states, oldest first."""
        return self._states.read()

    def ask(self, call: WriteState) -> None:
        """Ask the process for its whole state.

        Args:
            call: the driver's call.

        Raises:
            OSError: the process is gone, or the system has no descriptors left.
        """
        kept = {
            rank: [(state.point, state.is_forecast, state.content) for state in states]
            for rank, states in call.kept.items()
        }
        request = msgpack.packb((call.checkpoint, call.point, call.settles_s, kept))
        self._forget_request()
        # A pipe has no room for it: the process opens it by its number here.
        self._request = os.memfd_create("polytrain-survivor")
        with os.fdopen(self._request, "wb", closefd=False) as file:
            file.write(request)
        os.write(self._asking, b"%d %d\n" % (os.getpid(), self._request))

    def close(self) -> None:
        """Release all."""
        self._forget_request()
        self._states.close()
        os.close(self._asking)

    def _forget_request(self) -> None:
        if self._request is not None:
            os.close(self._request)
        self._request = None


_RANKS_WITH_BARS = 8
"""Ranks whose bars are shown while they move: a terminal has no room for more."""


class WorkerConnection:
    """The connection to one worker process. All methods run on the agent's event loop."""

    def __init__(
        self,
        order: LaunchOrder,
        rank: int,
        spec: AgentSpec,
        gpu_meter: GpuMeter | None,
        agent: Agent,
    ) -> None:
        """
        Raises:
            OSError: the system has no descriptors left.
        """
        self.order = order
        self.attempt = order.attempt
        self.child = Child(
            on_message=self._take,
            on_output=self._emit_output,
            one_pipe=spec.route.one_pipe,
            on_bars=self._emit_bars if spec.route.shows_bars and rank < _RANKS_WITH_BARS else None,
        )
        self.kept: KeptEnd | None = None
        """Its kept states, which outlive it; None if it keeps none. The agent closes it."""

        self.copies: dict[int, Copy] = {}
        """Number → copy of its state. The newest is the last."""

        self.has_finished = False
        """Whether the training has returned, or stopped after a checkpoint as requested."""

        self._rank = rank
        self._spec = spec
        self._agent = agent
        self._gpu_meter = gpu_meter
        self._watches: list[PeriodicProbe] = []
        self._reports = ReportReader(Ring(self.child.page.reports))
        self._next_look: asyncio.TimerHandle | None = None

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
        try:
            # Duplicate the descriptor: the page may be closed before the answer arrives.
            descriptor = os.dup(self.child.page.descriptor)
        except OSError as error:
            return f"not known: {error}"
        try:
            look = partial(stacks_of, self.child.pid, descriptor, pausing=pausing)
            with self._unwatched():
                return await in_daemon_thread(look)
        except RuntimeError as error:  # the system refuses the thread
            return f"not known: {error}"
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
        if (timeout_s := self._spec.hang_timeout_s) is not None:
            probes.append(ProgressProbe(attempt=attempt, rank=rank, timeout_s=timeout_s, now=now))
        if (window_s := self._spec.straggler_window_s) is not None:
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
            PeriodicProbe(probe, page=page, pid=pid, tell=self._agent.emit) for probe in probes
        ]

    def _look_away(self) -> None:
        for watch in self._watches:
            watch.close()

    def _look_for_reports(self) -> None:
        self._pass_reports_on(self._reports.take())

    def _pass_reports_on(self, reports: Sequence[Message]) -> None:
        """Pass on reports: all of them, or only the newest."""
        events = [to_event(each, attempt=self.attempt, rank=self._rank) for each in reports]
        passes_all = self._rank == 0 or self._spec.passes_all_reports
        for event in events if passes_all else events[-1:]:
            self._agent.emit(event)

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
            self._agent.preload(message)
            return
        if message == ["reports"]:
            self._take_call()
            return
        if self._take_of_survivor(message):
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
        self._agent.emit(to_event(message, attempt=self.attempt, rank=self._rank))
        if message[0] == "staged":
            self._agent.take_part(
                to_part(message, attempt_id=self.order.attempt_id, rank=self._rank)
            )

    def _take_of_survivor(self, message: Message) -> bool:
        """Take a message about the state that the process keeps; return whether it is one."""
        match message:
            case ["keeps", kept, capacity, asking, size]:
                self.kept = KeptEnd.opened(self.child.pid, kept, capacity, asking)
                if self.kept is not None:
                    self._agent.emit(KeepsState(attempt=self.attempt, rank=self._rank, size=size))
            case ["keeps_nothing", why]:
                self._agent.emit(KeepsNothing(attempt=self.attempt, rank=self._rank, reason=why))
            case ["written" | "copied" as tag, *_, is_report, is_ahead, is_earlier, before]:
                attempt_id = self.order.attempt_id
                part = to_part(message, attempt_id=attempt_id, rank=self._rank)
                reports = tuple((step, metrics) for step, metrics in before)
                state = Copy(part, is_report, is_ahead, is_earlier, reports)
                if tag == "copied":
                    self.copies[part.checkpoint] = state
                    self._agent.left.copied(self.copies)
                else:
                    self._agent.left.take_state(state)
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
                self._agent.emit(refused)
            case ["unwritten", checkpoint, why]:
                self._agent.left.not_written(checkpoint, why)
            case _:
                return False
        return True

    def _emit_output(self, stream: str, text: str) -> None:
        self._agent.emit(Output(attempt=self.attempt, rank=self._rank, stream=stream, text=text))

    def _emit_bars(self, rows: tuple[str, ...]) -> None:
        self._agent.emit(BarMoved(attempt=self.attempt, rank=self._rank, rows=rows))
