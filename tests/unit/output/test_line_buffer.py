"""Pieces of text become the lines that a terminal would show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.output.line_layout import LONGEST, LineBuffer


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        (["one\ntwo\n"], ["one", "two"], ""),
        (["lo", "ss\nne", "xt"], ["loss"], "next"),
        (["a\r\nb\r\n"], ["a", "b"], ""),
        (["a\r", "\nb"], ["a"], "b"),
        (["\r 10%", "\r 50%", "\r100%\n", "done\n"], ["100%", "done"], ""),
        ([" 10%\r", " 50%\r", "100%\r", "\n"], ["100%"], ""),
        (["10%\r20%\r", "30%"], [], "30%"),
        (["10%\r20%\r"], [], "20%"),
        (["\n\n"], ["", ""], ""),
        (["é", "\u2028x\n"], ["é\u2028x"], ""),
    ],
)
def test_lines(pieces: list[str], lines: list[str], rest: str) -> None:
    buffer = LineBuffer()
    assert [line for piece in pieces for line in buffer.feed(piece)] == lines
    assert buffer.take_rest() == rest
    assert buffer.take_rest() == ""


@given(st.lists(st.text(alphabet="ab\r\n", max_size=6)))
def test_where_the_text_is_cut_makes_no_difference(pieces: list[str]) -> None:
    one, other = LineBuffer(), LineBuffer()
    assert one.feed("".join(pieces)) == [line for each in pieces for line in other.feed(each)]
    assert one.take_rest() == other.take_rest()


def test_what_is_kept_of_a_bar_of_progress_does_not_grow() -> None:
    """An hour of updates and no newline: each would otherwise copy all before it."""
    buffer = LineBuffer()
    for step in range(36_000):
        assert buffer.feed(f"\r{step:6d} of 36000 |{'#' * 60}|") == []
    assert len(buffer.take_rest()) < 100


def test_a_line_without_an_end_is_passed_on_in_pieces() -> None:
    buffer = LineBuffer()
    shown = [line for _ in range(25) for line in buffer.feed("." * 10_000)]
    assert shown == ["." * LONGEST] * 2
    assert buffer.take_rest() == "." * 50_000
