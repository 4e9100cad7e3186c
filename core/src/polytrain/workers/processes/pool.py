"""A pool of processes on this machine for blocking callers: validators, predictions, the kit.

A zygote forks them, like worker processes. Their events arrive in one queue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from polytrain.linux.processes import kill_session
from polytrain.workers.processes.cache import keep, kept_or_new_zygote
from polytrain.workers.processes.channel import Message
from polytrain.workers.processes.child import Child
from polytrain.workers.processes.loop_thread import LoopThread, in_daemon_thread
from polytrain.workers.processes.zygote_client import ZygoteClient
from polytrain.workers.processes.zygote_connection import ZygoteSpec, has_ended, zygote_name

logger = logging.getLogger(__name__)

_NODE = "this process"

_ENDS_WITHIN_S = 10.0
"""Seconds within which a process must end after it is killed or closes its channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A process has sent a message."""

    number: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrote:
    """A process has written to its standard output or error."""

    number: int
    stream: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process has ended. All its messages and output have been yielded before."""

    number: int
    how: str
    """Description of its end, for people: "killed by SIGKILL", "exited with code 1"."""

    last_words: str
    """The end of its standard error, if that is captured."""

    lacked_memory: bool
    """Whether the kernel has ended it because it was out of memory."""


class ProcessPool:
    """Processes that end with this one. Use it from one thread, except where noted."""

    def __init__(
        self,
        spec: ZygoteSpec,
        entry: str,
        *,
        environment: Mapping[str, str],
        directory: str,
        captures_output: bool,
    ) -> None:
        """
        Args:
            spec: the zygote, with its address on this node; started if it isn't running.
            entry: the module whose `main` the processes run.
            captures_output: whether their output becomes events. Otherwise they write to this
                process's streams.
        """
        self._environment = environment
        self._directory = directory
        self._captures_output = captures_output
        self._events: queue.SimpleQueue[Sent | Wrote | Ended | None] = queue.SimpleQueue()
        self._children: dict[int, Child] = {}
        self._has_ended = asyncio.Event()
        """Set when a process has ended."""

        self._all_have_ended = False

        self._zygotes = ZygoteClient(spec, entry, listener=self)
        self._loop = LoopThread("polytrain-processes")

    def start(self, number: int, message: Message) -> None:
        """Start a process with this number, and send it its first message.

        Raises:
            OSError: it can't be started.
        """
        self._loop.submit(self._start(number, message)).result()

    def send(self, number: int, message: Message) -> None:
        """Send a message to a process, without waiting; do nothing if the process has ended."""
        self._loop.call(self._send, number, message)

    def kill(self, number: int) -> None:
        """Kill a process; leads to `Ended`."""
        self._loop.call(self._zygotes.kill, number)

    def count_as_ended(self, number: int, how: str) -> None:
        """Count a process that can't be killed as ended."""
        self._loop.call(self._end, number, how)

    def next(self, timeout_s: float | None = None) -> Sent | Wrote | Ended | None:
        """Wait for the next event; return None after this time, or if `wake` was called.

        Until its message is taken, a process blocks once its channel is full.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, Sent):
            self._loop.call(self._resume, event.number)
        return event

    def wake(self) -> None:
        """Make `next` return None. Any thread, or a signal handler, may call this."""
        self._events.put(None)

    def close(self) -> bool:
        """Kill the processes, and wait for their end; return whether all ended in time."""
        try:
            self._loop.submit(self._end_all()).result()
        finally:
            self._loop.close()
        return self._all_have_ended

    def process_started(self, number: int, pid: int) -> None:
        """See `Listener`."""
        if number in self._children:
            self._children[number].pid = pid

    def process_ended(self, number: int, how: str, *, killed: bool) -> None:
        """See `Listener`."""
        self._end(number, how)

    def process_lost(self, number: int, why: str) -> None:
        """See `Listener`."""
        if number in self._children and self._children[number].pid:
            kill_session(self._children[number].pid)
        self._end(number, "killed with its zygote")

    async def _start(self, number: int, message: Message) -> None:
        await self._zygotes.connect()
        child = Child(
            on_message=partial(self._sent, number),
            on_output=partial(self._wrote, number) if self._captures_output else None,
            on_close=partial(self._closing, number),
        )
        try:
            self._zygotes.fork(
                number,
                environment=self._environment,
                directory=self._directory,
                argv=sys.argv,
                descriptors=child.descriptors,
            )
        except BaseException:
            child.discard()
            raise
        self._children[number] = child
        child.begin(message)

    def _send(self, number: int, message: Message) -> None:
        if number in self._children:
            self._children[number].send(message)

    def _resume(self, number: int) -> None:
        if number in self._children:
            self._children[number].resume()

    def _sent(self, number: int, message: Message) -> None:
        self._children[number].pause()
        self._events.put(Sent(number=number, message=message))

    def _wrote(self, number: int, stream: str, text: str) -> None:
        self._events.put(Wrote(number=number, stream=stream, text=text))

    def _closing(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(_ENDS_WITHIN_S, self._end_overdue, self._children[number], number)

    def _end_overdue(self, child: Child, number: int) -> None:
        if self._children.get(number) is child:
            self._zygotes.kill(number)
            self._end(number, f"killed {_ENDS_WITHIN_S:g} s after the end of its connection")

    def _end(self, number: int, how: str) -> None:
        child = self._children.get(number)
        if child is None:
            return
        child.close()
        del self._children[number]
        self._has_ended.set()
        ended = Ended(
            number=number,
            how=child.explained(how),
            last_words=child.last_words,
            lacked_memory=child.lacked_memory(how),
        )
        self._events.put(ended)

    async def _end_all(self) -> None:
        try:
            for number in self._children:
                self._zygotes.kill(number)
            async with asyncio.timeout(_ENDS_WITHIN_S):
                while self._children:
                    self._has_ended.clear()
                    await self._has_ended.wait()
        except TimeoutError:
            logger.warning("%d processes aren't gone after SIGKILL.", len(self._children))
        finally:
            self._all_have_ended = not self._children
            for number in list(self._children):
                self._end(number, "is still there after SIGKILL")
            zygote = self._zygotes.close()
        if zygote is not None and not await in_daemon_thread(has_ended, zygote, else_here=True):
            zygote.kill()
            await in_daemon_thread(has_ended, zygote, else_here=True)


@contextmanager
def forked_pool(
    entry: str, modules: Sequence[str], variables: Mapping[str, str]
) -> Iterator[ProcessPool]:
    """Open a pool whose zygote the next pool or run may use, if it needs the same one.

    Args:
        entry: the module whose `main` the processes run.
        modules: modules to import first. An import that fails is repeated in the process.
        variables: environment variables of the processes, besides those of this one.
    """
    spec = ZygoteSpec(
        name="", environment=variables, modules=(entry, *modules), path=tuple(sys.path)
    )
    zygote = kept_or_new_zygote(spec, _NODE)
    pool = ProcessPool(
        replace(spec, name=zygote_name(zygote.token, _NODE)),
        entry,
        environment={**os.environ, **variables},
        directory=os.getcwd(),
        captures_output=False,
    )
    have_ended = False
    try:
        yield pool
    finally:
        try:
            have_ended = pool.close()
        finally:
            if have_ended:
                keep(zygote)
            else:
                # Its processes end with it.
                zygote.connection.end()
