"""Suggests known names for an unknown one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

SIMILAR = 0.5
"""Least similarity of a suggested name, from 0 to 1, as `difflib` measures it."""

ALMOST_THE_SAME = 0.8
"""Least similarity where other unknown names are allowed."""

_SIMILAR_FILE = 0.6
"""Least similarity of a file's name: two names of files often share an ending alone."""


def did_you_mean(name: object, names: Iterable[object], *, cutoff: float = SIMILAR) -> str:
    """Return a question with the most similar name, and a space; empty if none is similar."""
    near = close_to(name, names, cutoff=cutoff)
    return f"Did you mean {near[0]!r}? " if near else ""


def did_you_mean_file(path: Path) -> str:
    """Return a question with the most similar other name in a file's directory, and a space."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    others = [name for name in names if name.isprintable() and name != path.name]
    near = close_to(path.name, others, cutoff=_SIMILAR_FILE)
    return f"Did you mean {str(path.parent / near[0])!r}? " if near else ""


def close_to(name: object, names: Iterable[object], *, cutoff: float = SIMILAR) -> list[str]:
    """Return the known names that are similar to a misspelt one, the most similar first."""
    by_folded = {str(other).casefold(): str(other) for other in names}
    near = get_close_matches(str(name).casefold(), list(by_folded), n=3, cutoff=cutoff)
    return [by_folded[folded] for folded in near]
