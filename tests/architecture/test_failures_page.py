"""The page on failures describes every kind of failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain import FailureKind

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"


@pytest.mark.parametrize("kind", FailureKind)
def test_each_kind_has_a_row(kind: FailureKind) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{kind.name}` ")]
    assert len(rows) == 1, f"add a row for {kind.name} to the table of kinds in docs/failures.md"
