"""What a worker process writes to its pipes arrives whole, and its bars cost nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from polytrain.workers.processes.output_pipe import OutputPipe


@contextmanager
def opened(
    lines: list[str], heard: asyncio.Event | None = None
) -> Iterator[tuple[OutputPipe, int]]:
    """A pipe that is read, and its other end."""

    def tell(text: str) -> None:
        lines.append(text)
        if heard is not None:
            heard.set()

    reader, writer = os.pipe()
    pipe = OutputPipe(reader, on_text=tell)
    pipe.open()
    try:
        yield pipe, writer
    finally:
        os.close(writer)
        pipe.close()


def test_all_states_of_a_bar_are_one_piece() -> None:
    async def scenario() -> list[str]:
        messages: list[str] = []
        with opened(messages) as (pipe, writer):
            for done in range(100):
                os.write(writer, f"\r{done}%".encode())
                await asyncio.sleep(0)
            assert messages == []
            assert pipe.last_words.endswith("%")
        return messages

    assert asyncio.run(scenario()) == ["\r99%"]


class Waiting:
    """The event loop's clock: only what waits for a time lets it go on."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        self.now_s = 0.0
        self._meanwhile = meanwhile
        self._loop: Any = loop
        self._loop.time, self._loop.call_later = self._time, self._call_later

    def _time(self) -> float:
        return self.now_s

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.Handle:
        def at_that_time() -> None:
            self.now_s += delay_s
            self._meanwhile()
            call()

        return self._loop.call_soon(at_that_time)


def fill(writer: int, state: bytes) -> int:
    """Write states of a bar until the pipe is full; return the number of bytes."""
    written = 0
    try:
        while True:
            written += os.write(writer, state)
    except BlockingIOError:
        return written


@pytest.mark.parametrize("length", [20, 700, 2100])
def test_a_process_that_writes_a_bar_without_a_pause_does_not_wait(length: int) -> None:
    async def scenario() -> float:
        clock, found = Waiting(asyncio.get_running_loop()), list[str]()
        with opened(found) as (_, writer):
            os.set_blocking(writer, False)
            for _ in range(40):
                while not fill(writer, b"\r" + b"#" * (length - 1)):
                    await asyncio.sleep(0)
        return clock.now_s

    assert asyncio.run(scenario()) < 0.5


def test_a_bar_that_moves_slowly_wakes_nobody_at_each_state() -> None:
    async def scenario() -> tuple[int, int]:
        states, found = 0, list[str]()
        with opened(found) as (_, writer):

            def moves() -> None:
                nonlocal states
                states += 1
                os.write(writer, b"\r50%")

            clock = Waiting(asyncio.get_running_loop(), moves)
            moves()
            while clock.now_s < 100:
                await asyncio.sleep(0)
        return states, len(found)

    reads, passes = asyncio.run(scenario())
    assert reads < 250
    assert passes <= 11


def test_a_bar_that_stands_still_is_passed_on_and_what_follows_comes_at_once() -> None:
    async def scenario() -> list[str]:
        messages: list[str] = []
        heard = asyncio.Event()
        with opened(messages, heard) as (_, writer):
            os.write(writer, b"\r10%\r20%")
            await asyncio.wait_for(heard.wait(), 30)
            heard.clear()
            os.write(writer, b"\nloss 0.5\n")
            await asyncio.wait_for(heard.wait(), 30)
            assert messages == ["\r20%", "\nloss 0.5\n"]
        return messages

    asyncio.run(scenario())


def test_nothing_is_lost_between_bars() -> None:
    async def scenario() -> str:
        messages: list[str] = []
        with opened(messages) as (_, writer):
            os.write(writer, b"\r10%")
            await asyncio.sleep(0)
            os.write(writer, "größe\n".encode() * 1000)
            os.write(writer, b"\r20%")
            await asyncio.sleep(0)
            os.write(writer, b"\rend")
        return "".join(messages)

    text = asyncio.run(scenario())
    assert text.count("größe\n") == 1000
    assert text.endswith("\rend")


def test_what_was_written_before_a_failure_is_passed_on_before_it() -> None:
    async def scenario() -> list[str]:
        messages: list[str] = []
        with opened(messages) as (pipe, writer):
            os.write(writer, b"\r10%\rthe disk is full")
            pipe.read_all()
            return list(messages)

    assert asyncio.run(scenario()) == ["\rthe disk is full"]


def test_the_last_words_are_the_end_of_it() -> None:
    async def scenario() -> str:
        with opened([]) as (pipe, writer):
            os.write(writer, b"x" * 10_000 + b"\nout of memory")
            pipe.read_all()
            return pipe.last_words

    words = asyncio.run(scenario())
    assert words.endswith("x\nout of memory")
    assert len(words) == 4000
