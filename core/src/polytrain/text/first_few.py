"""Lists of which a message shows the first few, and counts."""

from __future__ import annotations

from collections.abc import Sequence


def first_few(shown: Sequence[str], most: int, *, of: str = "") -> str:
    """Return the first few of these texts, and how many others there are: "a, b and 3 more".

    Args:
        of: what they are, to be said with the number of the others.
    """
    others = len(shown) - most
    few = ", ".join(shown[:most])
    return few if others <= 0 else f"{few} and {others} more{f' {of}' if of else ''}"


def numbered(count: int, noun: str, verb: str = "") -> str:
    """Return a count with its noun: "1 worker", "2 workers", and, with "need", "1 worker needs".

    Args:
        noun: what, in the singular.
        verb: what more than one do.
    """
    if count != 1:
        return " ".join(filter(None, (f"{count} {noun}s", verb)))
    return " ".join(filter(None, (f"1 {noun}", _OF_ONE.get(verb, verb and f"{verb}s"))))


_OF_ONE = {"are": "is", "have": "has"}
"""Verbs whose singular isn't made with an "s"."""
