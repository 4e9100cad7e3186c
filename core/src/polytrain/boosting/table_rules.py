"""Rules for the values of a column.

A rule counts the rows of one rank that break it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.boosting.numbers import Numbers, floats

Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

_LARGEST = float(np.finfo(np.float32).max)
"""Boosters hold labels in float32, where larger numbers become infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Values of a column, on one rank or on all, that break a rule."""

    rows: int = 0
    example: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule that no row of a column may break."""

    option: str | None
    """The backend's option that names the column; None for a feature."""

    column: str
    find: Callable[[pa.ChunkedArray], Found]
    what: str
    """A predicate of the column, as in "the column 'y' has no value"."""

    remedy: str
    only_if_all: bool = False
    """Whether the rule is broken only if all rows break it."""


def required(option: str, column: str, *, may_be_infinite: bool = False) -> list[Rule]:
    """Return the rules that every row has a number, and that it is finite unless allowed."""
    missing = Rule(
        option=option,
        column=column,
        find=_finding(np.isnan, examples=False),
        what="has no value (null or NaN)",
        remedy="Leave such rows out, or give them a value",
    )
    if may_be_infinite:
        return [missing]
    return [
        missing,
        Rule(
            option=option,
            column=column,
            find=_finding(_is_infinite),
            what="is infinite, or too large for single precision",
            remedy="Leave such rows out, or scale the column",
        ),
    ]


def weights(option: str, column: str) -> list[Rule]:
    """Return the rules that weights are finite, not negative, and not all 0."""
    return [
        *required(option, column),
        Rule(
            option=option,
            column=column,
            find=_finding(lambda numbers: numbers < 0),
            what="is negative",
            remedy="Give weights of 0 or more",
        ),
        Rule(
            option=option,
            column=column,
            find=_finding(lambda numbers: numbers == 0, examples=False),
            what="is 0",
            remedy="Give at least one row a weight above 0",
            only_if_all=True,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The labels that an objective takes."""

    objective: str
    low: float
    high: float = float("inf")
    whole: bool = False

    def __str__(self) -> str:
        kind = "whole numbers" if self.whole else "numbers"
        if self.high == float("inf"):
            return f"{kind} from {self.low:g}"
        if self.whole and self.high - self.low == 1:
            return f"{self.low:g} and {self.high:g}"
        return f"{kind} from {self.low:g} to {self.high:g}"

    def rule(self, option: str, column: str) -> Rule:
        """Return the rule that the objective takes every label of the column."""
        return Rule(
            option=option,
            column=column,
            find=_finding(self._is_other),
            what=f"isn't a label of the objective {self.objective!r}, which takes {self}",
            remedy="Change these labels, or choose another objective",
        )

    def _is_other(self, numbers: Numbers) -> Mask:
        other: Mask = (numbers < self.low) | (numbers > self.high)
        return other | (np.floor(numbers) != numbers) if self.whole else other


def finite(features: pa.Schema, framework: str) -> list[Rule]:
    """Return the rules that no feature is infinite. The check makes no copy of floats.

    Integer columns of "train" have a rule too: another data set may have floats there.
    """
    return [
        Rule(
            option=None,
            column=field.name,
            find=_infinite_features,
            what=f"is infinite, or too large for single precision, which {framework} refuses",
            remedy="Replace it by a number, or by NaN where the value is not known",
        )
        for field in features
        if pa.types.is_floating(field.type) or pa.types.is_integer(field.type)
    ]


def _finding(
    broken: Callable[[Numbers], Mask], *, examples: bool = True
) -> Callable[[pa.ChunkedArray], Found]:
    """Return a function that finds the rows for which `broken` is true; NaN has its own rule."""

    def find(column: pa.ChunkedArray) -> Found:
        numbers = floats(column)
        mask = broken(numbers)
        if examples:
            mask &= ~np.isnan(numbers)
        rows = int(np.count_nonzero(mask))
        example = float(numbers[np.argmax(mask)]) if rows and examples else None
        return Found(rows=rows, example=example)

    return find


def _is_infinite(numbers: Numbers) -> Mask:
    mask: Mask = np.abs(numbers) > _LARGEST
    return mask


def _infinite_features(column: pa.ChunkedArray) -> Found:
    if not pa.types.is_floating(column.type):
        return Found()
    ends = pc.min_max(column).as_py()
    if ends["min"] is None or (ends["min"] >= -_LARGEST and ends["max"] <= _LARGEST):
        return Found()
    return _finding(_is_infinite)(column)
