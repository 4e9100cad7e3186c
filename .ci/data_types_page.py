"""Writes docs/data-types.md from the tables that tests/core/test_column_types.py tries."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "data-types.md"
TABLES = runpy.run_path(str(ROOT / "tests" / "core" / "column_types.py"))

HEAD = """\
# Types of columns

What a library gets of a column. An integer column with missing values, for example, is float64 with
NaN in NumPy.

A source gives each column a type of Arrow, by the first table. Each library gets what the second
table says of this type. After a comma stands what a missing value becomes.
"""

SOURCES = """
## From a source to a type

"dicts" is a list of dicts, "arrays" a dict of arrays or lists, "items" a map-style data set. "JSON"
is JSON Lines. Sources that a row doesn't name give the type that a table of Arrow has.
"""

LIBRARIES = """
## From a type to a library

`format="arrow"` has the type itself. Boosters get a `number`, or the number of a `category` in a
list that all ranks share. "error" is an error that names the column: before the start for boosters,
at the first such batch otherwise. Turn such a column into numbers in `transform` or, for torch, in
`collate_fn`.
"""

REMARKS = """
## Exceptions

- Times of a zone are those of UTC in NumPy.
- Whole numbers of 2**63 and more are an error in dicts. From CSV and JSON Lines they are float64,
  and an error if that would round them.
- A CSV file has text for bytes and for times of day with fractions, and whole numbers for
  durations. It has no structs. An empty field of text is an empty string.
- A time in JSON is text.
- Items are numbers, texts, bytes and arrays of one shape, and none may be missing. Anything else is
  an error that names the item.
- Python's values must fit into one column. Dates beside times, text beside bytes, nanoseconds of
  pandas in a list and times of day with a zone are errors.
- Minutes and hours of NumPy become seconds, months and years days.
- Periods of pandas and unions of Arrow are refused before the start, unless `columns` leaves them
  out.
- pandas before version 3 has objects, and None, in place of `str` and NaN.
"""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEAD + SOURCES, *sources(), LIBRARIES, *libraries(), REMARKS])


def sources() -> Iterator[str]:
    """One row for each column."""
    yield "| column | type | from other sources |"
    yield "|---|---|---|"
    for column, kind in TABLES["LIKE_ARROW"].items():
        others: dict[str, list[str]] = {}
        for source, other in TABLES["OTHERWISE"].get(column, {}).items():
            others.setdefault(other, []).append(source)
        shown = "; ".join(f"{', '.join(names)}: {code(each)}" for each, names in others.items())
        yield f"| {column} | {code(kind)} | {shown} |"


def libraries() -> Iterator[str]:
    """One row for all types of which the libraries get the same."""
    yield f"| type | {' | '.join(TABLES['LIBRARIES'])} |"
    yield "|---" * (len(TABLES["LIBRARIES"]) + 1) + "|"
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind, cells in TABLES["GETS"].items():
        kinds.setdefault(cells, []).append(code(kind))
    for cells, names in kinds.items():
        shown = (cell if cell == "error" else code(cell) for cell in cells)
        yield f"| {'; '.join(names)} | {' | '.join(shown)} |"


def code(text: str) -> str:
    """As it is written in a program."""
    return f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} is written\n")
