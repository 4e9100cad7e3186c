"""Small states outlive their process, and one that is torn doesn't count."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal

from polytrain.linux.kept_states import KeptState, KeptStates
from polytrain.testing.processes import eventually


def kept(content: bytes, point: int, is_forecast: bool = False) -> KeptState:
    return KeptState(point=point, is_forecast=is_forecast, content=content)


def test_a_reader_gets_the_last_points_and_their_forecasts() -> None:
    writer = KeptStates.new(100)
    reader = KeptStates(os.dup(writer.descriptor), 100)
    for point in range(1, 8):
        assert writer.put([b"gradients of ", b"%d" % point], point=point, is_forecast=True)
        assert writer.put([b"point %d" % point], point=point, is_forecast=False)
    found = reader.read()
    assert found[-2:] == (kept(b"gradients of 7", 7, True), kept(b"point 7", 7))
    assert {each.point for each in found if not each.is_forecast} == {2, 3, 4, 5, 6, 7}
    writer.close()
    reader.close()


def content_of(point: int, states: KeptStates) -> bytes:
    return bytes([point % 256]) * states.capacity


def write_for_ever(states: KeptStates) -> None:
    for point in itertools.count(1):
        for is_forecast in (True, False):
            states.put([content_of(point, states)], point=point, is_forecast=is_forecast)


def test_a_state_that_is_half_written_does_not_count() -> None:
    """A writer that stands still in the middle of a write leaves what one leaves that is killed."""
    states = KeptStates.new(1_000_000)
    writer = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(states,))
    writer.start()
    pid = writer.pid
    assert pid is not None

    def whole_states() -> int:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        found = states.read()
        os.kill(pid, signal.SIGCONT)
        assert all(each.content == content_of(each.point, states) for each in found)
        return len(found)

    try:
        # The last six points, and forecasts of two.
        assert eventually(lambda: whole_states() == 8, 10)
        for _ in range(5):
            assert eventually(lambda: whole_states() == 7, 10), "no look fell into a write"
    finally:
        writer.kill()
        writer.join()
        states.close()


def test_a_state_that_is_too_large_is_refused() -> None:
    states = KeptStates.new(10)
    assert not states.put([bytes(6), bytes(6)], point=1, is_forecast=False)
    assert states.read() == ()
    states.close()
