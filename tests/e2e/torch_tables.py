"""The tables of the docs that say what is exact: after a restart, or on several workers."""

from __future__ import annotations

from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"


def table(page: str, caption: str, column: int = 1) -> dict[str, str]:
    """By the name in the first column, the word in another one, if there is one.

    Args:
        page: its file.
        caption: the first column's heading.
        column: the number of the other one.
    """
    rows: dict[str, str] = {}
    is_in = False
    for line in (_DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_in = False
        elif cells[0] == caption:
            is_in = True
        elif is_in and not cells[0].startswith("-") and cells[column] != "–":
            for name in cells[0].split(", "):
                rows[name.strip("`")] = cells[column]
    return rows
