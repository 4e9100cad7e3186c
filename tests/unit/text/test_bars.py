"""Progress bars: their last state counts, and nothing else that is written is lost."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from polytrain.output.line_layout import LineBuffer
from polytrain.text.bars import BarStates


def passed(pieces: Sequence[str]) -> str:
    bars = BarStates()
    return "".join([*(bars.passed(piece) for piece in pieces), bars.take_held()])


def shown(text: str) -> list[str]:
    buffer = LineBuffer()
    return [*buffer.feed(text), buffer.take_rest()]


def test_of_a_bar_that_moves_nothing_passes_until_it_ends() -> None:
    bars = BarStates()
    assert [bars.passed(f"\r{done}%") for done in range(1000)] == [""] * 1000
    assert bars.moves
    assert bars.passed("\rdone\nnext") == "\rdone\nnext"
    assert not bars.moves


def test_the_last_state_of_a_bar_that_stands_still_can_be_had() -> None:
    bars = BarStates()
    bars.passed("begin\n\r10%\r20")
    assert bars.passed("%") == ""
    assert bars.held == bars.take_held() == "\r20%"
    assert bars.held == ""
    assert bars.passed("\r30%\n") == "\r30%\n"


def test_a_line_that_never_ends_is_not_kept() -> None:
    bars = BarStates()
    kept = [len(bars.held) for _ in range(1000) if bars.passed("\r" + "x" * 999) is not None]
    assert max(kept) <= 1000
    endless = BarStates()
    endless.passed("\r")
    text = "".join(endless.passed("x" * 999) for _ in range(1000))
    assert len(text) + len(endless.held) >= 999_000
    assert len(endless.held) <= 10_000


@given(st.lists(st.text(alphabet="ab \n", max_size=8), max_size=12))
def test_text_without_bars_passes_as_it_is_and_at_once(pieces: list[str]) -> None:
    bars = BarStates()
    assert [bars.passed(piece) for piece in pieces] == pieces


@given(st.lists(st.text(alphabet="ab\r\n", max_size=8), max_size=12))
def test_what_a_terminal_shows_of_each_line_is_the_same(pieces: list[str]) -> None:
    assert shown(passed(pieces)) == shown("".join(pieces))


class Pieces(io.StringIO):
    """Notes each write."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def write(self, text: str) -> int:
        self.all.append(text)
        return len(text)


@pytest.mark.parametrize("at_once", [1, 3, 50])
def test_bars_of_tqdm_one_below_the_other_become_a_line_each(at_once: int) -> None:
    written = Pieces()
    options = {"file": written, "mininterval": 0, "miniters": 1, "ncols": 60, "ascii": True}
    for _ in tqdm(range(3), desc="epochs", **options):
        for _ in tqdm(range(50), desc="batches", leave=False, **options):
            pass
        tqdm.write("validated", file=written)
    pieces = ["".join(written.all[at : at + at_once]) for at in range(0, len(written.all), at_once)]
    lines = [re.sub(r"\x1b\[A", "", line).strip() for line in shown(passed(pieces))]
    lines = [line for line in lines if line]
    assert lines.count("validated") == 3
    assert lines[-1].startswith("epochs: 100%|")
    if at_once == 50:
        # Each refresh of the lower bar would be a line: 150 of them.
        assert len(lines) < 15


UP, CLEARED, HIDE, SHOW = "\x1b[1A", "\r\x1b[2K", "\x1b[?25l", "\x1b[?25h"
DRAWN = [
    f"{HIDE}epochs 0%\nbatches 0%",
    f"{CLEARED}{UP}\x1b[2Kepochs 0%\nbatches 50%",
    f"{CLEARED}{UP}\x1b[2Kepoch 0 is done\nepochs 50%\nbatches 100%",
    f"{CLEARED}{UP}\x1b[2Kepochs 100%\nbatches 100%",
    f"\n{SHOW}done\n",
]
"""As rich draws: two bars, above which a line is printed."""


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bars_that_are_drawn_together_are_a_line_each_once(size: int) -> None:
    text = "".join(DRAWN)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    lines = [line for line in shown(passed(pieces)) if line]
    assert lines == ["epoch 0 is done", "epochs 100%", "batches 100%", "done"]


def test_bars_are_seen_as_they_are_now() -> None:
    bars, seen = BarStates(), []
    for piece in DRAWN:
        bars.passed(piece)
        seen.append(bars.rows)
    assert seen[:2] == [("epochs 0%", "batches 0%"), ("epochs 0%", "batches 50%")]
    assert seen[-1] == ()


def test_the_upper_of_two_bars_stays_seen_while_the_lower_one_moves() -> None:
    bars = BarStates()
    bars.passed("\repochs 10%\n\rbatches 1%\x1b[A")
    # The lower one takes so long for a step that the upper one's state was passed on meanwhile.
    assert bars.take_held() == "\repochs 10%"
    assert bars.take_held() == ""
    bars.passed("\n\rbatches 2%\x1b[A")
    assert bars.rows == ("epochs 10%", "batches 2%")


def test_a_bar_that_goes_back_by_characters_is_one_line() -> None:
    """As Keras draws."""
    pieces = ["1/2 ====", "\b" * 8 + "\r" + "2/2 ====", " loss 0.5\n"]
    assert shown(passed(pieces)) == ["2/2 ==== loss 0.5", ""]
