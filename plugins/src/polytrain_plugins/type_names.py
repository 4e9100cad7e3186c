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


def a_type(value: Any) -> str:
    """Return what a value is: `an int`, `None`, or `the class Adam` for a class itself."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return a name of a type with "a" or "an" before it."""
    return f"an {name}" if _SPOKEN_VOWEL.match(name) else f"a {name}"
