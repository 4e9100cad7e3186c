"""What is written to the user's streams stays in order, and holds up nobody who prints."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest
from tests.unit.output.test_call_queues import held

from polytrain.output.call_queues import KEPT, CallQueues
from polytrain.output.echo import write_text
from polytrain.testing.processes import eventually


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="ascii") as stream:
        yield reader, stream
    os.close(reader)


def test_what_the_program_has_printed_comes_first(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    stream.write("printed, ")
    write_text(stream, "and a line of polytrain: 50\N{DEGREE SIGN}\n")
    assert os.read(reader, 1000) == b"printed, and a line of polytrain: 50\\xb0\n"


def test_nobody_else_waits_for_a_reader_that_has_stopped(pipe: tuple[int, TextIO]) -> None:
    """Neither a `print` of another thread nor the interpreter, which flushes when it ends."""
    reader, stream = pipe
    text = "x" * 1_000_000
    writes = threading.Thread(target=write_text, args=(stream, text), daemon=True)
    writes.start()
    is_full = select.poll()
    is_full.register(stream, select.POLLOUT)
    assert eventually(lambda: not is_full.poll(0))
    flushes = threading.Thread(target=stream.flush, daemon=True)
    flushes.start()
    flushes.join(30)
    assert not flushes.is_alive()
    written = 0
    while written < len(text):
        written += len(os.read(reader, 1 << 16))
    writes.join(30)
    assert not writes.is_alive()


def test_a_descriptor_that_does_not_wait_gets_all_of_it(pipe: tuple[int, TextIO]) -> None:
    """Another process has changed the terminal that it shares with this one."""
    reader, stream = pipe
    os.set_blocking(stream.fileno(), False)
    writes = threading.Thread(target=write_text, args=(stream, "x" * 300_000), daemon=True)
    writes.start()
    written = 0
    while written < 300_000:
        written += len(os.read(reader, 1 << 16))
    writes.join(30)
    assert not writes.is_alive()


def test_lines_that_nobody_has_read_are_counted_where_they_are_missing(
    pipe: tuple[int, TextIO],
) -> None:
    reader, stream = pipe
    with CallQueues() as queues:
        queue = queues.of(stream)
        with held(queue):
            queue.submit(lambda: write_text(stream, "kept\n"), size=KEPT)
            for _ in range(3):
                queue.submit(lambda: write_text(stream, "left out\n"))
        assert queue.finish()
        queue.submit(lambda: write_text(stream, "later\n"))
    assert os.read(reader, 1000).decode() == (
        "kept\n"
        "[polytrain: 3 lines of output were left out here: nobody has read fast enough]\n"
        "later\n"
    )
