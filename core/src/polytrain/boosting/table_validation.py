"""Values that can't be trained on: found before anybody trains, and told to all ranks alike.

A framework checks the rows of one rank, in its own words, while the others wait; or it takes what
is wrong, and ends in a model that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.boosting.categories import Gather
from polytrain.boosting.numbers import Numbers, floats
from polytrain.common.errors import BadDataError
from polytrain_plugins import Problem

Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

_LARGEST = float(np.finfo(np.float32).max)
"""Beyond it a number is infinite to both boosters, which have single-precision labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Values of a column, on one rank or on all, that break a rule."""

    rows: int = 0
    example: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What no row of a column may be like."""

    option: str | None
    """The option that names the column; None for a feature."""

    column: str
    find: Callable[[pa.ChunkedArray], Found]
    what: str
    """Of the column, as in "the column 'y' has no value"."""

    remedy: str
    only_if_all: bool = False
    """It is allowed for some rows, and not for all of them."""


def refuse(tables: Mapping[str, pa.Table], rules: Sequence[Rule], *, gather: Gather) -> None:
    """Look at all values that there are rules for.

    Args:
        tables: a rank's shard "train"; on rank 0, all rows of every other data set.
        rules: the same ones on every rank.
        gather: of all ranks, each of which calls this.

    Raises:
        BadDataError: on every rank, the same one, if a row of any breaks a rule.
    """
    mine = {
        name: (len(table), [rule.find(table.column(rule.column)) for rule in rules])
        for name, table in tables.items()
    }
    everybodys = gather(mine)
    problems = []
    for name in everybodys[0]:
        parts = [each[name] for each in everybodys if name in each]
        rows = sum(rows for rows, _ in parts)
        for rule, *found in zip(rules, *(found for _, found in parts), strict=True):
            broken = sum(each.rows for each in found)
            if broken and (broken == rows or not rule.only_if_all):
                examples = [each.example for each in found if each.example is not None]
                problems.append(_problem(rule, name, f"{broken} of {rows}", examples[:1]))
    if problems:
        raise BadDataError(tuple(problems))


def is_constant(column: pa.ChunkedArray, *, gather: Gather) -> bool:
    """Whether all rows of all ranks have the same number. Every rank calls it."""
    numbers = floats(column)
    ends = gather((float(numbers.min()), float(numbers.max())) if len(numbers) else None)
    return len({end for pair in ends if pair is not None for end in pair}) == 1


def required(option: str, column: str) -> list[Rule]:
    """Every row has a number, and none that is infinite."""
    return [
        Rule(
            option=option,
            column=column,
            find=_finding(np.isnan, examples=False),
            what="has no value (null or NaN)",
            remedy="Leave such rows out, or give them a value",
        ),
        Rule(
            option=option,
            column=column,
            find=_finding(_is_infinite),
            what="is infinite, or too large for single precision",
            remedy="Leave such rows out, or scale the column",
        ),
    ]


def weights(option: str, column: str) -> list[Rule]:
    """Weights of rows."""
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
            remedy="Give some rows a weight above 0: without one nothing can be learned",
            only_if_all=True,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What an objective takes as labels."""

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
        """That every label is one of them."""
        return Rule(
            option=option,
            column=column,
            find=_finding(self._is_other),
            what=f"is no label for the objective {self.objective!r}, which takes {self}",
            remedy="Change these labels, or choose another objective",
        )

    def _is_other(self, numbers: Numbers) -> Mask:
        other: Mask = (numbers < self.low) | (numbers > self.high)
        return other | (np.floor(numbers) != numbers) if self.whole else other


def finite(features: pa.Schema, framework: str) -> list[Rule]:
    """No feature is infinite. Those that can be are looked at without a copy.

    Of whole numbers in "train", another data set may have numbers of any kind.
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
    """What looks for the rows of which this is true; NaN is for another rule."""

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


def _problem(rule: Rule, dataset: str, rows: str, examples: Sequence[float]) -> Problem:
    such_as = "".join(f" (such as {example:g})" for example in examples)
    return Problem(
        field=rule.option or f"datasets[{dataset!r}]",
        what=f"in {rows} row(s) of {dataset!r} the column {rule.column!r} {rule.what}{such_as}",
        remedy=rule.remedy,
    )
