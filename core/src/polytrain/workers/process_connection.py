"""One worker process as its agent sees it: the lines to it, and what comes out of them."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import socket
from collections.abc import Callable
from functools import partial

from polytrain.checkpoint.parts import StagedPart
from polytrain.common.output import Output
from polytrain.common.processes import oom_kills
from polytrain.monitoring.progress_page import Page
from polytrain.monitoring.progress_probe import Probe, ProgressProbe, Watch
from polytrain.monitoring.stacks import stacks_of
from polytrain.monitoring.utilization_probe import UtilizationProbe
from polytrain.workers.group import Happening
from polytrain.workers.job import LaunchOrder
from polytrain.workers.messages import FrameBuffer, Message, pack, to_event, to_part
from polytrain.workers.report_ring import Ring, calls_every_s

READ_SIZE = 1 << 16

_LAST_WORDS = 4000
"""Characters of a worker process's standard error that are kept to explain its end."""


class ProcessConnection:
    """The socket and the pipes of the worker process of one attempt.

    All of it happens on the agent's event loop.
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
    ) -> None:
        """
        Args:
            order: what the worker process is started for.
            rank: which rank of the attempt it is.
            tell: gets what the worker process says and writes.
            stage: gets the parts of checkpoints that it hands over.
            imported: gets what it says that it has imported.
            hang_timeout_s: seconds without progress that are told; None for none.
            straggler_window_s: seconds over which it is told how busy it was; None for never.
        """
        self.order = order
        self.pid = 0
        """Of the worker process; 0 until the zygote has told it."""

        self.last_words = ""
        """What it has written last on its standard error."""

        self.ended_at: float | None = None
        """When it was first seen that its process is ending, on the event loop's clock."""

        self.page = Page()
        self._oom_kills = oom_kills()
        self._rank = rank
        self._tell = tell
        self._stage = stage
        self._imported = imported
        self._hang_timeout_s = hang_timeout_s
        self._straggler_window_s = straggler_window_s
        self._watches: list[Watch] = []
        self._frames = FrameBuffer()
        self._ring = Ring(self.page.reports)
        self._frames_of_ring = FrameBuffer()
        self._next_look: asyncio.TimerHandle | None = None
        self._connection, self._their_connection = socket.socketpair()
        pipes = {stream: os.pipe() for stream in ("stdout", "stderr")}
        self._streams = {reader: stream for stream, (reader, _) in pipes.items()}
        self._writers = [writer for _, writer in pipes.values()]
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {reader: decoder("replace") for reader in self._streams}

    @property
    def attempt(self) -> int:
        """Which the worker process belongs to."""
        return self.order.attempt

    @property
    def theirs(self) -> tuple[int, ...]:
        """The worker process's ends, in the order in which the zygote wants them."""
        return (self._their_connection.fileno(), *self._writers, self.page.descriptor)

    def begin(self, message: Message) -> None:
        """Say the first thing, and listen. The worker has its ends now: ours of them are closed.

        Raises:
            OSError: it is gone already.
        """
        self._their_connection.close()
        for writer in self._writers:
            os.close(writer)
        self._connection.sendall(pack(message))
        self._connection.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._connection, self._read_messages)
        for reader in self._streams:
            os.set_blocking(reader, False)
            loop.add_reader(reader, self._read_output, reader)

    @property
    def memory_ran_out(self) -> bool:
        """Whether the machine's kernel has ended processes for want of memory meanwhile."""
        return oom_kills() > self._oom_kills

    def send(self, message: Message) -> None:
        """Say something, unless the worker process is gone: that is about to be told."""
        with contextlib.suppress(OSError):
            self._connection.setblocking(True)
            self._connection.sendall(pack(message))
            self._connection.setblocking(False)

    def close(self) -> None:
        """Take what the worker process has handed over: it is still in the lines, complete."""
        loop = asyncio.get_running_loop()
        self._read_messages()
        self._take_reports()
        self._look_away()
        self._cancel_look()
        loop.remove_reader(self._connection)
        self._ring.close()
        self._connection.close()
        self.page.close()
        for reader in self._streams:
            self._read_output(reader)
            loop.remove_reader(reader)
            os.close(reader)

    async def stacks(self, pausing: bool) -> str:
        """What the worker process is doing, frame by frame. Takes a bounded time.

        Args:
            pausing: whether it may be paused for that.
        """
        if not self.pid:
            return "not known: it has not been forked yet"
        # Its own: the page may be closed before the answer is there.
        descriptor = os.dup(self.page.descriptor)
        try:
            loop = asyncio.get_running_loop()
            look = partial(stacks_of, self.pid, descriptor, pausing=pausing)
            return await loop.run_in_executor(None, look)
        finally:
            os.close(descriptor)

    def _watch_over(self) -> None:
        """From now on, tell when the worker process makes no progress, and how busy it is."""
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
                # Its process is ending; the zygote will say how.
                self.ended_at = asyncio.get_running_loop().time()
                asyncio.get_running_loop().remove_reader(self._connection)
                return
            for message in self._frames.feed(data):
                self._take(message)

    def _take_reports(self) -> None:
        """Tell what is in the ring: of ranks other than 0, how far they are is enough."""
        events = [
            to_event(message, attempt=self.attempt, rank=self._rank)
            for message in self._frames_of_ring.feed(self._ring.take())
        ]
        for event in events if self._rank == 0 else events[-1:]:
            self._tell(event)

    def _take_call(self) -> None:
        self._take_reports()
        self._cancel_look()
        # The worker process relies on it: what it writes until then, it doesn't call for.
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(calls_every_s(self._rank), self._take_reports)

    def _cancel_look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()

    def _take(self, message: Message) -> None:
        if message[0] == "imported":
            self._imported(message)
            return
        if message == ["reports"]:
            self._take_call()
            return
        self._take_reports()
        if message[0] == "raised":
            # What it wrote before it failed is heard before the failure: it may be the reason.
            for reader in self._streams:
                self._read_output(reader)
        if message[0] == "joined":
            self._watch_over()
        if message[0] in ("done", "raised"):
            self._look_away()
        self._tell(to_event(message, attempt=self.attempt, rank=self._rank))
        if message[0] == "staged":
            self._stage(to_part(message, attempt_id=self.order.attempt_id, rank=self._rank))

    def _read_output(self, reader: int) -> None:
        """Pass on all that the pipe holds now."""
        while True:
            try:
                data = os.read(reader, READ_SIZE)
            except BlockingIOError:
                return
            text = self._decoders[reader].decode(data, final=not data)
            if text and self._streams[reader] == "stderr":
                self.last_words = (self.last_words + text)[-_LAST_WORDS:]
            if text:
                output = Output(
                    attempt=self.attempt,
                    rank=self._rank,
                    stream=self._streams[reader],
                    text=text,
                )
                self._tell(output)
            if not data:
                asyncio.get_running_loop().remove_reader(reader)
                return
