"""Validates checkpoints on the driver's machine: a zygote forks a process for each."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polytrain.events.output import Output, OutputLimit
from polytrain.linux.processes import describe_exit, oom_kills
from polytrain.linux.readable import is_readable
from polytrain.validation.process import bounded_threads, task_message
from polytrain.validation.validator import NotValidated, Validated, ValidationTask
from polytrain.workers.messages import FrameBuffer, Message, pack
from polytrain.workers.output_pipe import LAST_WORDS, READ_SIZE
from polytrain.workers.process_ends import ProcessEnds
from polytrain.workers.processes.client import ZygoteConnection, ZygoteSpec

_ENTRY = "polytrain.validation.process"

_KILL_TIMEOUT_S = 60.0
"""Seconds that a killed process may take to end. It frees its memory meanwhile."""

_SIGKILLED = describe_exit(signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationProcessSpec:
    """The settings of the processes that validate."""

    zygote: ZygoteSpec
    """The zygote that forks them, with its address on this node. Its `variables` are theirs too."""

    environment: Mapping[str, str]
    directory: str
    """The driver's working directory."""

    threads: int
    """Threads that libraries may start, where `zygote.variables` don't say it."""

    leave_timeout_s: float = 60.0
    """Seconds that a process may take to end once the function has returned."""


class LocalValidator:
    """A `Validator` whose processes die with the driver."""

    def __init__(
        self, spec: ValidationProcessSpec, function: bytes, *, tell: Callable[[Output], None]
    ) -> None:
        """
        Args:
            spec: the settings of the processes.
            function: the pickled validation function.
            tell: called with what they write, from the thread that calls `validate`.
        """
        self._spec = spec
        self._function = function
        self._tell = tell
        self._zygote: ZygoteConnection | None = None
        self._is_cancelled = threading.Event()
        self._wakes, self._waker = socket.socketpair()
        self._number = 0

    def validate(self, task: ValidationTask) -> Validated | NotValidated | None:
        self._number += 1
        try:
            with _Process(tell=self._tell) as process:
                zygote = self._forked(process, task)
                timed_out = self._waited(process, zygote, task.timeout_s)
        except OSError as error:
            return NotValidated(reason=f"its process can't be started: {error}")
        if process.outcome is not None:
            return process.outcome
        if timed_out:
            reason = f"it took more than timeout_s={task.timeout_s:g} seconds, and was killed"
            return NotValidated(reason=reason, timed_out=True)
        return None if self._is_cancelled.is_set() else process.death()

    def cancel(self) -> None:
        self._is_cancelled.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def close(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
        self._wakes.close()
        self._waker.close()

    def _forked(self, process: _Process, task: ValidationTask) -> ZygoteConnection:
        if self._zygote is not None and _has_ended(self._zygote):
            self._zygote.leave()
            self._zygote = None
        if self._zygote is None:
            self._zygote = ZygoteConnection.open(self._spec.zygote)
        spec = self._spec
        variables, path = spec.zygote.variables, list(spec.zygote.path)
        bounds = bounded_threads(spec.threads, unless=variables)
        environment = {**spec.environment, **bounds, **variables}
        self._zygote.request(
            ["fork", self._number, environment, spec.directory, path, sys.argv, _ENTRY],
            process.theirs,
        )
        process.begin(task_message(self._function, task, bounds))
        return self._zygote

    def _waited(self, process: _Process, zygote: ZygoteConnection, timeout_s: float | None) -> bool:
        """Wait until the process is gone, and kill it if need be.

        Returns:
            Whether it took too long.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_killed = timed_out = is_leaving = False
        frames = FrameBuffer()
        with selectors.DefaultSelector() as selector:
            for source in (*process.sources, zygote.socket.fileno(), self._wakes.fileno()):
                selector.register(source, selectors.EVENT_READ)
            while not process.how:
                if process.outcome is not None and not is_leaving:
                    is_leaving, deadline = True, time.monotonic() + self._spec.leave_timeout_s
                is_late = deadline is not None and time.monotonic() >= deadline
                if is_killed and is_late:
                    process.how = f"hasn't ended {_KILL_TIMEOUT_S:g} s after SIGKILL"
                    break
                timed_out = timed_out or is_late
                if not is_killed and (timed_out or self._is_cancelled.is_set()):
                    is_killed, deadline = True, time.monotonic() + _KILL_TIMEOUT_S
                    # If the zygote is gone, so is the process.
                    with contextlib.suppress(OSError):
                        zygote.request(["kill", self._number])
                # Without a limit if the user has set none: a lost zygote closes its connection.
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                for key, _ in selector.select(left_s):
                    if key.fd == zygote.socket.fileno():
                        process.how = self._how_it_ended(frames, zygote)
                    elif key.fd == self._wakes.fileno():
                        self._wakes.recv(1)
                    elif not process.read(key.fd):
                        selector.unregister(key.fileobj)
        process.read_the_rest()
        return timed_out

    def _how_it_ended(self, frames: FrameBuffer, zygote: ZygoteConnection) -> str:
        """Read what the zygote says; return how the process ended, or nothing if it runs."""
        data = zygote.socket.recv(READ_SIZE)
        if not data:
            # The next validation starts another zygote.
            self._zygote = None
            zygote.leave()
            return "killed with its zygote"
        ended = (each for each in frames.feed(data) if each[:2] == ["ended", self._number])
        return next((how for _, _, how, _ in ended), "")


class _Process:
    """The driver's ends of one process: its socket, its pipes, and what came out of them."""

    def __init__(self, *, tell: Callable[[Output], None]) -> None:
        self.how = ""
        """How it ended, for people; empty while it runs."""

        self.outcome: Validated | NotValidated | None = None
        """What it has sent."""

        self._frames = FrameBuffer()
        self._ends = ProcessEnds()
        self._connection = self._ends.connection
        self._streams = {
            reader.fileno(): _Stream(stream, tell=tell)
            for stream, reader in self._ends.pipes.items()
        }
        self._oom_kills = oom_kills()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    @property
    def theirs(self) -> tuple[int, ...]:
        """The process's descriptors, in the order of the zygote's request."""
        return self._ends.theirs

    @property
    def sources(self) -> tuple[int, ...]:
        """The descriptors to listen to."""
        return (self._connection.fileno(), *self._streams)

    def begin(self, message: Message) -> None:
        """Send the first message. The process has its ends now: ours of them are closed."""
        self._ends.close_theirs()
        # If it is gone, the zygote says how.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(pack(message))
        for source in self.sources:
            os.set_blocking(source, False)

    def read(self, source: int) -> bool:
        """Take what there is to read from a source; return whether more may come."""
        try:
            data = os.read(source, READ_SIZE)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if source in self._streams:
            self._streams[source].take(data)
            return bool(data)
        for message in self._frames.feed(data):
            self.outcome = _outcome(message)
        return bool(data)

    def read_the_rest(self) -> None:
        """Take all that it has sent: it is gone."""
        for source in self.sources:
            while is_readable(source) and self.read(source):
                pass
        for stream in self._streams.values():
            stream.end()

    def death(self) -> NotValidated:
        """Why there is no outcome."""
        is_lack_of_memory = self.how == _SIGKILLED and oom_kills() > self._oom_kills
        memory = ", as the kernel was out of memory," if is_lack_of_memory else ""
        said = next(each.last_words for each in self._streams.values() if each.name == "stderr")
        return NotValidated(
            reason=f"its process {_verb(self.how)}{memory} before it returned", output=said
        )


class _Stream:
    """Passes on what a process writes to its standard output or error."""

    def __init__(self, name: str, *, tell: Callable[[Output], None]) -> None:
        self.name = name
        self.last_words = ""
        """The end of it."""

        self._tell = tell
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._limit = OutputLimit(now=time.monotonic())

    def take(self, data: bytes) -> None:
        text = self._decoder.decode(data, final=not data)
        self.last_words = (self.last_words + text)[-LAST_WORDS:]
        self._pass_on(self._limit.passed(text, now=time.monotonic()))

    def end(self) -> None:
        self._pass_on(self._limit.notice())

    def _pass_on(self, text: str) -> None:
        if text:
            self._tell(Output(attempt=0, rank=None, stream=self.name, text=text))


def _has_ended(zygote: ZygoteConnection) -> bool:
    """Whether a zygote has closed its connection, while no process of it was waited for."""
    return is_readable(zygote.socket) and not zygote.socket.recv(1, socket.MSG_PEEK)


def _verb(how: str) -> str:
    return f"was {how}" if how.startswith("killed") else how


def _outcome(message: Message) -> Validated | NotValidated:
    match message:
        case ["validated", metrics]:
            return Validated(metrics=metrics)
        case ["raised", summary, text, pickled, _]:
            return NotValidated(reason=summary, traceback=text, error=pickled)
    raise ValueError(f"unknown message {message[:1]}")
