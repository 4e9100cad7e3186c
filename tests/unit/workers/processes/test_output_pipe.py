"""What a worker process writes to its pipes arrives whole, and its bars cost nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from polytrain.workers.processes.forked import marked_errors
from polytrain.workers.processes.output_pipe import BOTH, OutputPipe


@contextmanager
def opened(
    lines: list[str], heard: asyncio.Event | None = None
) -> Iterator[tuple[OutputPipe, int]]:
    """A pipe that is read, and its other end."""

    def tell(stream: str, text: str) -> None:
        lines.append(text)
        if heard is not None:
            heard.set()

    reader, writer = os.pipe()
    pipe = OutputPipe(reader, stream="stdout", on_text=tell)
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


def both_in_one_pipe(write: Callable[[int], None]) -> list[tuple[str, str]]:
    """What arrives of a process that writes both streams to one pipe, after `write`."""

    async def scenario() -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        reader, writer = os.pipe()
        pipe = OutputPipe(
            reader, stream=BOTH, on_text=lambda stream, text: found.append((stream, text))
        )
        pipe.open()
        write(writer)
        os.close(writer)
        pipe.close()
        return found

    return asyncio.run(scenario())


def test_both_streams_in_one_pipe_keep_the_order_in_which_they_were_written() -> None:
    def write(writer: int) -> None:
        with marked_errors(writer) as errors:
            for step in range(3):
                os.write(writer, f"step {step}\n".encode())
                print("warning", step, file=errors)

    assert both_in_one_pipe(write) == [
        ("stdout", "step 0\n"),
        ("stderr", "warning 0\n"),
        ("stdout", "step 1\n"),
        ("stderr", "warning 1\n"),
        ("stdout", "step 2\n"),
        ("stderr", "warning 2\n"),
    ]


def test_a_line_that_is_printed_while_a_bar_moves_stays_whole() -> None:
    def write(writer: int) -> None:
        with marked_errors(writer) as errors:
            print("\r10%", end="", file=errors, flush=True)
            os.write(writer, b"loss 0.5\n")
            print("\r20%", file=errors)

    assert both_in_one_pipe(write) == [("stdout", "loss 0.5\n"), ("stderr", "\r20%\n")]


def test_text_longer_than_a_pipe_takes_at_once_is_marked_to_its_end() -> None:
    def write(writer: int) -> None:
        with marked_errors(writer) as errors:
            print("é" * 20_000, file=errors)
        os.write(writer, b"out\n")

    found = both_in_one_pipe(write)
    assert "".join(text for stream, text in found if stream == "stderr") == "é" * 20_000 + "\n"
    assert found[-1] == ("stdout", "out\n")


def test_a_bar_that_is_read_seldom_is_caught_up_with_before_later_output() -> None:
    """With a pipe for each stream: the end of a bar comes before the line that follows it."""

    async def scenario() -> list[str]:
        loop, found = asyncio.get_running_loop(), list[str]()
        heard = asyncio.Event()

        def tell(stream: str, text: str) -> None:
            found.append(text)
            if stream == "stdout":
                heard.set()

        (error_reader, errors), (reader, writer) = os.pipe(), os.pipe()
        slow = OutputPipe(error_reader, stream="stderr", on_text=tell)
        other = OutputPipe(reader, stream="stdout", on_text=tell, before_text=slow.catch_up)
        # A bar's reader pauses; here the pause never ends.
        never: Any = lambda delay_s, call: loop.create_future()  # noqa: E731
        loop.call_later = never  # type: ignore[method-assign]
        slow.open()
        other.open()
        os.write(errors, b"\r10%")
        while slow.last_words != "\r10%":
            await asyncio.sleep(0)
        os.write(errors, b"\r100%\n")
        os.write(writer, b"epoch 0 is done\n")
        await heard.wait()
        for end, pipe in ((errors, slow), (writer, other)):
            os.close(end)
            pipe.close()
        return found

    assert asyncio.run(scenario()) == ["\r100%\n", "epoch 0 is done\n"]


def test_a_bar_is_seen_while_it_moves_and_until_it_ends() -> None:
    async def scenario() -> list[tuple[str, ...]]:
        seen: list[tuple[str, ...]] = []
        stands_still = asyncio.Event()
        reader, writer = os.pipe()
        done = 0

        def moves() -> None:
            nonlocal done
            done += 1
            if clock.now_s < 9:
                os.write(writer, f"\r{done}%".encode())

        clock = Waiting(asyncio.get_running_loop(), moves)
        pipe = OutputPipe(
            reader,
            stream="stderr",
            on_text=lambda stream, text: stands_still.set(),
            on_bars=seen.append,
        )
        pipe.open()
        moves()
        await stands_still.wait()
        assert seen[-1] != ()
        os.write(writer, b"\n")
        while seen[-1] != ():
            await asyncio.sleep(0)
        os.close(writer)
        pipe.close()
        return seen

    seen = asyncio.run(scenario())
    assert 10 <= len(seen) <= 52
    assert seen.count(()) == 1


# As tqdm draws an inner bar below an outer one, and takes it away.
NESTED = "\router 0%\n\rinner 50%\x1b[A\n\r         \x1b[A\router 100%\n"


def test_nested_bars_that_have_ended_are_not_seen_any_more_below_what_came_after() -> None:
    async def scenario() -> tuple[list[str], list[tuple[str, ...]]]:
        texts: list[str] = []
        seen: list[tuple[str, ...]] = []
        heard = asyncio.Event()

        def tell(stream: str, text: str) -> None:
            texts.append(text)
            if text:
                heard.set()

        Waiting(asyncio.get_running_loop())
        reader, writer = os.pipe()
        pipe = OutputPipe(reader, stream="stderr", on_text=tell, on_bars=seen.append)
        pipe.open()
        os.write(writer, f"{NESTED}the bars are done\n".encode())
        await heard.wait()
        await asyncio.sleep(0)
        os.close(writer)
        pipe.close()
        return texts, seen

    texts, seen = asyncio.run(scenario())
    assert "".join(texts) == "\router 100%\n\rthe bars are done\n"
    assert seen[-1] == ()


def test_nested_bars_that_have_ended_come_before_what_is_printed_after_them() -> None:
    def write(writer: int) -> None:
        with marked_errors(writer) as errors:
            errors.write(NESTED)
            errors.flush()
            os.write(writer, b"the bars are done\n")

    # The inner bar has left blanks.
    found = [(stream, text.strip()) for stream, text in both_in_one_pipe(write) if text]
    assert found == [("stderr", "outer 100%"), ("stdout", "the bars are done")]
