"""What a worker process writes to its pipes arrives whole, and its bars cost nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

from polytrain.workers.output_pipe import OutputPipe


@contextmanager
def opened(told: list[str], heard: asyncio.Event | None = None) -> Iterator[tuple[OutputPipe, int]]:
    """A pipe that is read, and its other end."""

    def tell(text: str) -> None:
        told.append(text)
        if heard is not None:
            heard.set()

    reader, writer = os.pipe()
    pipe = OutputPipe(reader, tell=tell)
    pipe.open()
    try:
        yield pipe, writer
    finally:
        os.close(writer)
        pipe.close()


def test_all_states_of_a_bar_are_one_piece() -> None:
    async def scenario() -> list[str]:
        told: list[str] = []
        with opened(told) as (pipe, writer):
            for done in range(100):
                os.write(writer, f"\r{done}%".encode())
                await asyncio.sleep(0)
            assert told == []
            assert pipe.last_words.endswith("%")
        return told

    assert asyncio.run(scenario()) == ["\r99%"]


def test_a_bar_that_stands_still_is_passed_on_and_what_follows_comes_at_once() -> None:
    async def scenario() -> list[str]:
        told: list[str] = []
        heard = asyncio.Event()
        with opened(told, heard) as (_, writer):
            os.write(writer, b"\r10%\r20%")
            await asyncio.wait_for(heard.wait(), 30)
            heard.clear()
            os.write(writer, b"\nloss 0.5\n")
            await asyncio.wait_for(heard.wait(), 30)
            assert told == ["\r20%", "\nloss 0.5\n"]
        return told

    asyncio.run(scenario())


def test_nothing_is_lost_between_bars() -> None:
    async def scenario() -> str:
        told: list[str] = []
        with opened(told) as (_, writer):
            os.write(writer, b"\r10%")
            await asyncio.sleep(0)
            os.write(writer, "größe\n".encode() * 1000)
            os.write(writer, b"\r20%")
            await asyncio.sleep(0)
            os.write(writer, b"\rend")
        return "".join(told)

    text = asyncio.run(scenario())
    assert text.count("größe\n") == 1000
    assert text.endswith("\rend")


def test_what_was_written_before_a_failure_is_passed_on_before_it() -> None:
    async def scenario() -> list[str]:
        told: list[str] = []
        with opened(told) as (pipe, writer):
            os.write(writer, b"\r10%\rthe disk is full")
            pipe.read_all()
            return list(told)

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
