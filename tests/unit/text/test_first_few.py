"""Lists of which a message shows the first few."""

from __future__ import annotations

import pytest

from polytrain.text.described import first_few, numbered


@pytest.mark.parametrize(
    ("names", "of", "shown"),
    [
        ([], "", ""),
        (["a"], "", "a"),
        (["a", "b"], "nodes", "a, b"),
        (["a", "b", "c"], "", "a, b and 1 more"),
        (["a", "b", "c", "d"], "nodes", "a, b and 2 more nodes"),
    ],
)
def test_the_others_are_counted(names: list[str], of: str, shown: str) -> None:
    assert first_few(names, 2, of=of) == shown


@pytest.mark.parametrize(
    ("verb", "one", "none"),
    [
        ("", "1 worker", "0 workers"),
        ("need", "1 worker needs", "0 workers need"),
        ("have", "1 worker has", "0 workers have"),
        ("are", "1 worker is", "0 workers are"),
    ],
)
def test_one_is_in_the_singular(verb: str, one: str, none: str) -> None:
    assert numbered(1, "worker", verb) == one
    assert numbered(0, "worker", verb) == none
