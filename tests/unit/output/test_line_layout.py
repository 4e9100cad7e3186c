"""Lines for terminals: nothing in them moves the cursor, and they are as wide as they may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from polytrain.output.line_layout import Segment, columns, cut, fitted, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loss", "loss"),
        ("größe 数", "größe 数"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202eevil", "\\u202eevil"),
        ("a\u2028b", "a\\u2028b"),
    ],
)
def test_nothing_is_left_that_a_terminal_obeys(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(max_size=40), st.integers(min_value=0, max_value=30))
def test_a_cut_text_is_never_wider_than_it_may_be(text: str, width: int) -> None:
    shown = printable(text)
    assert columns(cut(shown, width)) <= width
    if columns(shown) <= width:
        assert cut(shown, width) == shown


@pytest.mark.parametrize("text", ["loss 0.1", "数据 loss", "e\u0301tat", "▁▂▃ · …"])
def test_columns_are_those_of_a_terminal(text: str) -> None:
    assert columns(text) == wcswidth(text)


PARTS = [
    Segment(text="higgs", weight=2),
    Segment(text="step 412 of 2000", weight=9),
    Segment(text="41 s left", weight=7),
    Segment(text="", weight=9),
    Segment(text="loss 0.31", weight=1),
    Segment(text="auc 0.9", weight=1),
]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (100, "higgs · step 412 of 2000 · 41 s left · loss 0.31 · auc 0.9"),
        (50, "higgs · step 412 of 2000 · 41 s left · loss 0.31"),
        (36, "higgs · step 412 of 2000 · 41 s left"),
        (30, "step 412 of 2000 · 41 s left"),
        (20, "step 412 of 2000"),
        (10, "step 412 …"),
        (0, ""),
    ],
)
def test_the_least_important_parts_go_first(width: int, line: str) -> None:
    assert fitted(PARTS, width) == line


def test_a_part_that_may_be_cut_is_cut_before_any_is_left_out() -> None:
    parts = [
        Segment(text="2 ranks", weight=5),
        Segment(text="killed by SIGKILL", weight=1, least=8),
    ]
    parts.append(Segment(text="goodput 91%", weight=2))
    assert fitted(parts, 36) == "2 ranks · killed by S… · goodput 91%"
    assert fitted(parts, 34) == "2 ranks · killed by… · goodput 91%"
    assert fitted(parts, 28) == "2 ranks · goodput 91%"
