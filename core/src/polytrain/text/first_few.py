"""Lists of which a message shows the first few, and counts."""

from __future__ import annotations

from collections.abc import Sequence


def first_few(shown: Sequence[str], most: int, *, of: str = "") -> str:
    """Return the first few of these texts, and how many others there are: "a, b and 3 more".

    Args:
        shown: the texts.
        most: how many of them to show.
        of: what they are, to be said with the number of the others.
    """
    others = len(shown) - most
    few = ", ".join(shown[:most])
    return few if others <= 0 else f"{few} and {others} more{f' {of}' if of else ''}"


def numbered(count: int, noun: str) -> str:
    """Return a count with its noun: "1 worker", "2 workers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
