"""The agent's connection to one worker process: its socket, its pipes and their messages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from polytrain.checkpoint.parts import StagedPart
from polytrain.events.output import Output
from polytrain.linux.processes import oom_kills
from polytrain.observe.progress_probe import Probe, ProgressProbe, Watch
from polytrain.observe.stacks import stacks_of
from polytrain.observe.utilization_probe import UtilizationProbe
from polytrain.workers.group import Happening
from polytrain.workers.job import LaunchOrder
from polytrain.workers.messages import FrameBuffer, Message, ReportReader, pack, to_event, to_part
from polytrain.workers.output_pipe import READ_SIZE, OutputPipe
from polytrain.workers.process_ends import ProcessEnds
from polytrain.workers.report_ring import Ring, calls_every_s


class ProcessConnection:
    """The socket and the pipes of the worker process of one attempt.

    All methods run on the agent's event loop.
    """

    def __init__(
        self,
        order: LaunchOrder,
        rank: int,
        *,
        tell: Callable[[Happening], None],
        stage: Callable[[StagedPart], None],
        imported: Callable[[Message], None],
        hang_timeout_s: float | None,
        straggler_window_s: float | None,
        passes_all_reports: bool,
    ) -> None:
        """
        Args:
            order: the order of the attempt.
            rank: the worker process's rank.
            tell: called with the worker process's events and output.
            stage: called with the parts of checkpoints that it has staged.
            imported: called with the modules that it has imported.
            hang_timeout_s: seconds without progress after which an event is sent; None for never.
            straggler_window_s: seconds over which its load is measured; None for never.
            passes_all_reports: whether all reports are passed on that are there at once, and not
                only the newest.
        """
        self.order = order
        self.pid = 0
        """Process id of the worker process; 0 until the zygote has sent it."""

        self.ended_at: float | None = None
        """When the agent first noticed that the process is ending, on the event loop's clock."""

        self._ends = ProcessEnds()
        self.page = self._ends.page
        self._connection = self._ends.connection
        self._oom_kills = oom_kills()
        self._rank = rank
        self._tell = tell
        self._stage = stage
        self._imported = imported
        self._hang_timeout_s = hang_timeout_s
        self._straggler_window_s = straggler_window_s
        self._passes_all_reports = passes_all_reports
        self._watches: list[Watch] = []
        self._frames = FrameBuffer()
        self._reports = ReportReader(Ring(self.page.reports))
        self._next_look: asyncio.TimerHandle | None = None
        self._unsent = bytearray()
        """What the worker process's socket has had no room for."""

        self._pipes: dict[str, OutputPipe] = {}

    @property
    def attempt(self) -> int:
        """The worker process's attempt."""
        return self.order.attempt

    @property
    def last_words(self) -> str:
        """The end of its standard error."""
        return self._pipes["stderr"].last_words

    @property
    def theirs(self) -> tuple[int, ...]:
        """The worker process's descriptors, in the order of the zygote's request."""
        return self._ends.theirs

    def begin(self, message: Message) -> None:
        """Say the first thing, and listen. The worker has its ends now: ours of them are closed."""
        self._ends.close_theirs()
        self._connection.setblocking(False)
        self.send(message)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection, self._read_messages)
        for stream, reader in self._ends.pipes.items():
            pipe = OutputPipe(reader.detach(), tell=partial(self._emit_output, stream))
            self._pipes[stream] = pipe
            pipe.open()

    def discard(self) -> None:
        """Close all: no process was forked."""
        self._reports.close()
        self._ends.close()

    @property
    def memory_ran_out(self) -> bool:
        """Whether the kernel has killed processes for lack of memory since the start."""
        return oom_kills() > self._oom_kills

    def send(self, message: Message) -> None:
        """Say something, once the worker process reads it.

        Nobody waits for that here: the agent has other things to do.
        """
        self._unsent += pack(message)
        self._send_some()

    def _send_some(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The worker process is gone; the zygote is about to report its end.
            self._unsent.clear()
        if self._unsent:
            loop.add_writer(self._connection, self._send_some)
        else:
            loop.remove_writer(self._connection)

    def close(self) -> None:
        """Read what the worker process has sent, which is complete, and close the connection."""
        loop = asyncio.get_running_loop()
        self._read_messages()
        self._look_for_reports()
        self._look_away()
        self._cancel_look()
        loop.remove_reader(self._connection)
        loop.remove_writer(self._connection)
        self._reports.close()
        for pipe in self._pipes.values():
            pipe.close()
        self._ends.close()

    async def stacks(self, pausing: bool) -> str:
        """Return the stacks of the worker process, within a bounded time.

        Args:
            pausing: whether it may be paused for this.
        """
        if not self.pid:
            return "not known: it has not been forked yet"
        # A duplicate: the page may be closed before the answer arrives.
        descriptor = os.dup(self.page.descriptor)
        try:
            loop = asyncio.get_running_loop()
            look = partial(stacks_of, self.pid, descriptor, pausing=pausing)
            with self._unwatched():
                return await loop.run_in_executor(None, look)
        finally:
            os.close(descriptor)

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Pause the watches: what reads stacks looks like a debugger, in which no process hangs.

        At the end they look once, so that progress made meanwhile is reported before the stacks.
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
        """From now on, report when the worker process makes no progress, and its load."""
        attempt, rank = self.attempt, self._rank
        now = asyncio.get_running_loop().time()
        lookers: list[Probe] = []
        if (timeout_s := self._hang_timeout_s) is not None:
            lookers.append(ProgressProbe(attempt=attempt, rank=rank, timeout_s=timeout_s, now=now))
        if (window_s := self._straggler_window_s) is not None and len(self.order.members) > 1:
            lookers.append(UtilizationProbe(attempt=attempt, rank=rank, window_s=window_s, now=now))
        self._watches = [
            Watch(looker, page=self.page, pid=self.pid, tell=self._tell) for looker in lookers
        ]

    def _look_away(self) -> None:
        for watch in self._watches:
            watch.close()

    def _read_messages(self) -> None:
        while True:
            try:
                data = self._connection.recv(READ_SIZE)
            except OSError:
                return
            if not data:
                # The process is ending; the zygote will report how.
                self.ended_at = asyncio.get_running_loop().time()
                asyncio.get_running_loop().remove_reader(self._connection)
                return
            for message in self._frames.feed(data):
                self._take(message)

    def _look_for_reports(self) -> None:
        self._tell_reports(self._reports.take())

    def _tell_reports(self, reports: Sequence[Message]) -> None:
        """Pass on reports: all of them, or only the newest."""
        events = [to_event(each, attempt=self.attempt, rank=self._rank) for each in reports]
        for event in events if self._passes_all_reports else events[-1:]:
            self._tell(event)

    def _take_call(self) -> None:
        self._cancel_look()
        # The worker process relies on this look: until then it writes reports without calling.
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(calls_every_s(self._rank), self._look_for_reports)

    def _cancel_look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()

    def _take(self, message: Message) -> None:
        self._tell_reports(self._reports.before_message())
        if message[0] == "imported":
            self._imported(message)
            return
        if message == ["reports"]:
            self._take_call()
            return
        if message[0] == "raised":
            # Output before the failure is passed on first: it may hold the reason.
            for pipe in self._pipes.values():
                pipe.read_all()
        if message[0] == "joined":
            self._watch_over()
        if message[0] in ("done", "raised"):
            self._look_away()
        self._tell(to_event(message, attempt=self.attempt, rank=self._rank))
        if message[0] == "staged":
            self._stage(to_part(message, attempt_id=self.order.attempt_id, rank=self._rank))

    def _emit_output(self, stream: str, text: str) -> None:
        self._tell(Output(attempt=self.attempt, rank=self._rank, stream=stream, text=text))
