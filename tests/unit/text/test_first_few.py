"""Lists of which a message shows the first few."""

from __future__ import annotations

import pytest

from polytrain.text.first_few import first_few


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
