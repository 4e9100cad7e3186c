"""Names the type of a value in a sentence."""

from __future__ import annotations

import re
from typing import Any

_SPOKEN_VOWEL = re.compile(
    r"""
    (?!(?i:eu|uni|us|ut|uint|one))[AEIOUaeiou]   # an int, a uint8, a UserCallback
    | [FHLMNRSX](?=[A-Z]|$)                      # letter by letter: an XGBoost…, an LGBMRegressor
    | nd(?=array)                                # n-d-array
    """,
    re.VERBOSE,
)
"""How a name begins that is spoken with a vowel first."""


_LONGEST = 80
"""Characters of a wrong value that tell the user which one it is."""


def a_type(value: Any) -> str:
    """Return what a value is: `an int`, `None`, or `the class Adam` for a class itself."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else with_article(type(value).__name__)


def quoted(value: Any) -> str:
    """Return a value as one writes it, if that is a short line; otherwise what it is."""
    if isinstance(value, int) and abs(value) >= 10**_LONGEST:
        return f"a whole number of more than {_LONGEST} digits"
    try:
        text = repr(value)
    except Exception:  # a user's own may raise anything, and Python writes no thousands of digits
        return a_type(value)
    if isinstance(value, str) and len(text) > _LONGEST:
        return f"{text[:_LONGEST]}…"
    is_written = len(text) <= _LONGEST and text.isprintable() and not text.startswith("<")
    return text if is_written else a_type(value)


def with_article(name: str) -> str:
    """Return a name of a type with "a" or "an" before it."""
    return f"an {name}" if _SPOKEN_VOWEL.match(name) else f"a {name}"
