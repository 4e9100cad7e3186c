"""Small states outlive their process, and one that is torn doesn't count."""

from __future__ import annotations

import contextlib
import os

from polytrain.linux.kept_states import KeptState, KeptStates


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
    assert {each.point for each in found if not each.is_forecast} == {4, 5, 6, 7}
    writer.close()
    reader.close()


def test_a_state_that_a_kill_has_torn_does_not_count() -> None:
    class KilledError(Exception):
        pass

    class Piece(bytes):
        def __len__(self) -> int:
            self.looks = getattr(self, "looks", 0) + 1
            if self.looks > 1:
                raise KilledError
            return 1

    states = KeptStates.new(100)
    for point in (1, 2, 3, 4):
        states.put([b"whole"], point=point, is_forecast=False)
    with contextlib.suppress(KilledError):
        states.put([b"half", Piece(b"x")], point=5, is_forecast=False)
    # Its slot was that of the oldest.
    assert [each.point for each in states.read()] == [2, 3, 4]
    states.close()


def test_a_state_that_is_too_large_is_refused() -> None:
    states = KeptStates.new(10)
    assert not states.put([bytes(6), bytes(6)], point=1, is_forecast=False)
    assert states.read() == ()
    states.close()
