"""The two ends of all that connects a process to the one that has it forked."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack

from polytrain.linux.forked_children import OwnDescriptor, keep_from_children
from polytrain.linux.progress_page import Page


class ProcessEnds:
    """A socket, two pipes for output, and a progress page."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: the system has no descriptors left. Then none of these is left open.
        """
        with ExitStack() as stack:
            self.page = Page()
            stack.callback(self.page.close)
            self.connection, self._their_connection = socket.socketpair()
            for end in (self.connection, self._their_connection):
                keep_from_children(stack.enter_context(end))
            self.pipes: dict[str, OwnDescriptor] = {}
            """The ends to read from, by the name of the stream."""

            self._writers: list[OwnDescriptor] = []
            for stream in ("stdout", "stderr"):
                self.pipes[stream], writer = map(OwnDescriptor, os.pipe())
                self._writers.append(writer)
                stack.callback(self.pipes[stream].close)
                stack.callback(writer.close)
            self._opened = stack.pop_all()

    @property
    def theirs(self) -> tuple[int, ...]:
        """The process's descriptors, in the order of the zygote's request."""
        writers = (writer.fileno() for writer in self._writers)
        return (self._their_connection.fileno(), *writers, self.page.descriptor)

    def close_theirs(self) -> None:
        """Close the process's ends here, once it has them: then its end can be read."""
        self._their_connection.close()
        for writer in self._writers:
            writer.close()

    def close(self) -> None:
        """Close all."""
        self._opened.close()
