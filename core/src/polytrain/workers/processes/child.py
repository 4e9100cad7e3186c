"""Connects this process to one that a zygote forks for it: its channel, output, page and end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from polytrain.linux.machine_resources import OWN_GROUPS
from polytrain.linux.processes import (
    OwnDescriptor,
    describe_exit,
    keep_from_children,
    oom_kills,
)
from polytrain.linux.progress_page import Page
from polytrain.workers.processes.channel import FrameBuffer, Message, pack
from polytrain.workers.processes.output_pipe import BOTH, READ_SIZE, OutputPipe

_SIGKILLED = describe_exit(signal.SIGKILL)


class Child:
    """A forked process, seen from here. After `begin`, all methods run on one event loop."""

    def __init__(
        self,
        *,
        on_message: Callable[[Message], None],
        on_output: Callable[[str, str], None] | None,
        on_close: Callable[[], None] = lambda: None,
        one_pipe: bool = False,
        on_bars: Callable[[tuple[str, ...]], None] | None = None,
    ) -> None:
        """
        Args:
            on_message: called with each message of the process.
            on_output: called with a stream's name and the text that the process writes to it;
                None if it writes to the streams of this process.
            on_close: called when the process has closed its end of the channel.
            one_pipe: whether both streams have one pipe.
            on_bars: called with the rows of progress bars on its standard error, or on both if
                they have one pipe, whenever they have moved; None if nobody looks.

        Raises:
            OSError: the system has no descriptors left. Those already opened are closed.
        """
        self.pid = 0
        """Its process id; 0 until the zygote has sent it."""

        self.ended_at: float | None = None
        """The event loop's time at which its end was first noticed; None before."""

        self._on_message = on_message
        self._on_output = on_output
        self._on_close = on_close
        self._on_bars = on_bars
        self._oom_kills_in_group = OWN_GROUPS.oom_kills()
        self._oom_kills = oom_kills()
        self._frames = FrameBuffer()
        self._pipes: dict[str, OutputPipe] = {}
        self._unsent = bytearray()
        """Frames for which its socket has had no room."""

        self._readers: dict[str, OwnDescriptor] = {}
        self._writers: list[OwnDescriptor] = []
        with ExitStack() as stack:
            self.page = Page()
            stack.callback(self.page.close)
            self._connection, self._their_connection = socket.socketpair()
            for end in (self._connection, self._their_connection):
                keep_from_children(stack.enter_context(end))
            streams = (BOTH,) if one_pipe else ("stdout", "stderr")
            for stream in streams if on_output is not None else ():
                self._readers[stream], writer = map(OwnDescriptor, os.pipe())
                self._writers.append(writer)
                stack.callback(self._readers[stream].close)
                stack.callback(writer.close)
            self._opened = stack.pop_all()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors for the process, in the order of a request to fork."""
        output = [writer.fileno() for writer in self._writers] or [1, 2]
        if len(output) == 1:
            output *= 2
        return (self._their_connection.fileno(), *output, self.page.descriptor)

    @property
    def last_words(self) -> str:
        """The end of its standard error, or of all output if that has one pipe."""
        pipe = self._pipes.get("stderr") or self._pipes.get(BOTH)
        return "" if pipe is None else pipe.last_words

    def lacked_memory(self, how: str) -> bool:
        """Return whether it has ended because the kernel was out of memory, by how it has ended.

        Of processes of one control group that are killed at the same time, all seem to have.
        """
        if how != _SIGKILLED or self._oom_kills_in_group is None:
            return False
        return (OWN_GROUPS.oom_kills() or 0) > self._oom_kills_in_group

    def explained(self, how: str) -> str:
        """Return how it has ended, with a cause that isn't certain.

        If its control group has no count, the kernel may have killed any process of the machine.
        """
        is_counted = self._oom_kills_in_group is not None
        if how != _SIGKILLED or is_counted or oom_kills() == self._oom_kills:
            return how
        return f"{how}, perhaps because the kernel was out of memory,"

    def begin(self, message: Message) -> None:
        """Send the first message, and listen. This closes the process's ends here."""
        self._their_connection.close()
        for writer in self._writers:
            writer.close()
        self._connection.setblocking(False)
        self.send(message)
        self.resume()
        for stream, reader in self._readers.items():
            assert self._on_output is not None
            pipe = OutputPipe(
                reader.detach(),
                stream=stream,
                on_text=self._on_output,
                before_text=partial(self._catch_up, stream),
                on_bars=None if stream == "stdout" else self._on_bars,
            )
            self._pipes[stream] = pipe
            pipe.open()

    def send(self, message: Message) -> None:
        """Queue a message, and send it once its socket has room."""
        self._unsent += pack(message)
        self._send_some()

    def pause(self) -> None:
        """Read no further message until `resume` is called."""
        asyncio.get_running_loop().remove_reader(self._connection)

    def resume(self) -> None:
        """Read messages as they arrive."""
        if self.ended_at is None:
            asyncio.get_running_loop().add_reader(self._connection, self._read)

    def read_output(self) -> None:
        """Pass on the output so far."""
        for pipe in self._pipes.values():
            pipe.read_all()

    def read_messages(self) -> None:
        """Read all messages that it has sent so far."""
        while self._read():
            pass

    def close(self) -> None:
        """Read all messages and output of the ended process, and close everything."""
        self.read_messages()
        self.pause()
        asyncio.get_running_loop().remove_writer(self._connection)
        for pipe in self._pipes.values():
            pipe.close()
        self._opened.close()

    def discard(self) -> None:
        """Close everything: no process was forked."""
        self._opened.close()

    def _catch_up(self, stream: str) -> None:
        """Before text of a stream is passed on, pass on the other's that has waited longer."""
        for other, pipe in self._pipes.items():
            if other != stream:
                pipe.catch_up()

    def _send_some(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The process is gone; the zygote is about to report its end.
            self._unsent.clear()
        if self._unsent:
            loop.add_writer(self._connection, self._send_some)
        else:
            loop.remove_writer(self._connection)

    def _read(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            data = self._connection.recv(READ_SIZE)
        except OSError:
            return False
        if not data:
            # The zygote will report how it ends.
            if self.ended_at is None:
                self.ended_at = asyncio.get_running_loop().time()
                self._on_close()
            self.pause()
            return False
        for message in self._frames.feed(data):
            self._on_message(message)
        return True
