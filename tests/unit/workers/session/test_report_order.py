"""Reports arrive in the order in which they were made, whichever way each of them took."""

from __future__ import annotations

import socket

from hypothesis import example, given
from hypothesis import strategies as st

from polytrain.workers.processes.channel import (
    FrameBuffer,
    Message,
    ReportReader,
    Ring,
    SocketChannel,
)
from polytrain.workers.session.messages import report_message

ROOM = 100
"""Bytes of a ring with room for two reports."""

ACTIONS = st.sampled_from(["report", "checkpoint", "look", "read"])


@given(st.lists(ACTIONS, max_size=40))
@example(["report"] * 4 + ["look"] + ["report"] * 2 + ["look", "report"])
@example(["report", "checkpoint", "report", "look"])
def test_none_is_lost_and_none_overtakes(actions: list[str]) -> None:
    """The agent looks at the ring by a timer, and reads the socket when it is woken."""
    memory = memoryview(bytearray(ROOM))
    sent: list[Message] = []
    got: list[Message] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        channel, reader, frames = SocketChannel(theirs), ReportReader(Ring(memory)), FrameBuffer()
        channel.gather_reports(Ring(memory), calls_every_s=1e9)

        def read() -> None:
            try:
                data = ours.recv(1 << 16)
            except BlockingIOError:
                return
            for message in frames.feed(data):
                got.extend(reader.before_message())
                got.append(message)

        for number, action in enumerate(actions):
            if action in ("report", "checkpoint"):
                report = report_message(number, {})
                more = [["staged", number]] if action == "checkpoint" else []
                channel.send(report, *more)
                sent += [report, *more]
            elif action == "look":
                got += reader.take()
            else:
                read()
        read()
        got += reader.take()
    assert [message for message in got if message != ["reports"]] == sent
