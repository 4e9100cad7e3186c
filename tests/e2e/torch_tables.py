"""The tables of the docs of torch and its libraries that say what a restart resumes exactly."""

from __future__ import annotations

from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"


def table(page: str, caption: str) -> dict[str, str]:
    """By the name in the first column, the word in the second one.

    Args:
        page: its file.
        caption: the first column's heading.
    """
    rows: dict[str, str] = {}
    is_in = False
    for line in (_DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_in = False
        elif cells[0] == caption:
            is_in = True
        elif is_in and not cells[0].startswith("-"):
            for name in cells[0].split(", "):
                rows[name.strip("`")] = cells[1]
    return rows
