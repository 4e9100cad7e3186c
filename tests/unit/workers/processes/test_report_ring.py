"""A ring of reports: everything comes out once and in order, wherever the ring's end lies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polytrain.workers.processes.channel import Ring

SIZE = 120


def ring() -> tuple[Ring, Ring]:
    """A writer and a reader of the same memory."""
    memory = memoryview(bytearray(SIZE))
    return Ring(memory), Ring(memory)


@given(st.lists(st.one_of(st.binary(max_size=60), st.none()), max_size=60))
def test_what_was_put_comes_out_once_and_in_order(actions: list[bytes | None]) -> None:
    writer, reader = ring()
    put, taken = b"", b""
    for frame in actions:
        if frame is None:
            taken += reader.take()
        elif writer.put(frame):
            put += frame
    assert taken + reader.take() == put
    assert reader.take() == b""


@given(st.integers(0, 200))
def test_a_frame_fits_into_an_empty_ring_or_never(length: int) -> None:
    writer, _ = ring()
    fits = writer.put(bytes(length))
    again, reader = ring()
    again.put(b"something")
    reader.take()
    assert again.put(bytes(length)) == fits


def test_a_full_ring_takes_nothing_until_it_is_read() -> None:
    writer, reader = ring()
    while writer.put(b"frame"):
        pass
    assert not writer.put(b"frame")
    reader.take()
    assert writer.put(b"frame")


def test_what_is_not_whole_yet_is_left_for_later() -> None:
    """The count may be seen before the bytes are."""
    memory = bytearray(SIZE)
    writer, reader = Ring(memoryview(memory)), Ring(memoryview(memory))
    writer.put(b"first")
    writer.put(b"second")
    late = memory.index(b"second")
    memory[late] = 0
    assert reader.take() == b"first"
    memory[late] = ord("s")
    assert reader.take() == b"second"
