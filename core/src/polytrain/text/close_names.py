"""Suggests known names for an unknown one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def did_you_mean(name: object, names: Iterable[object]) -> str:
    """Return a question with the most similar name, and a space; empty if none is similar."""
    near = close_to(str(name), [str(each) for each in names])
    return f"Did you mean {near[0]!r}? " if near else ""


def close_to(name: str, names: Sequence[str]) -> list[str]:
    """Return the known names that are similar to a misspelt one, the most similar first."""
    by_folded = {other.casefold(): other for other in names}
    near = get_close_matches(name.casefold(), list(by_folded), n=3, cutoff=0.5)
    return [by_folded[folded] for folded in near]
