"""Checks values by rules before training, and raises the same error on all ranks.

Without these checks, a framework fails on one rank while the others wait, or accepts wrong values
and trains a wrong model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.boosting.booster import Booster
from polytrain.boosting.columns import (
    Gather,
    Numbers,
    floats,
    plainly_typed,
    warn_of_numbers_as_text,
    without_categories,
)
from polytrain.errors import BadDataError
from polytrain_plugins import Problem

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
    above: bool = False
    """Whether `low` itself isn't one of them."""

    def __str__(self) -> str:
        kind = "whole numbers" if self.whole else "numbers"
        if self.above:
            return f"{kind} above {self.low:g}"
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
        too_low = numbers <= self.low if self.above else numbers < self.low
        other: Mask = too_low | (numbers > self.high)
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


logger = logging.getLogger(__name__)


def validated(
    tables: Mapping[str, pa.Table],
    options: Booster,
    *,
    labels: Labels | None,
    rules: Sequence[Rule] = (),
    gather: Gather,
    is_logging_rank: bool,
) -> dict[str, pa.Table]:
    """Return the tables with the columns of "train", in its order, in types that frameworks know.

    Logs a warning if all rows have the same label, or if text columns hold mostly numbers.

    Args:
        tables: a rank's shard "train"; on rank 0, all rows of every other data set.
        labels: the labels that the objective takes; None to skip this check.
        is_logging_rank: whether this rank logs the warning.

    Raises:
        BadDataError: on every rank, if a row of any rank breaks a rule.
    """
    names = tables["train"].column_names
    features = options.features_of(names)
    others = [name for name in names if name in options.columns_besides_features]
    tables = {
        name: plainly_typed(without_categories(table.select(names), others), features)
        for name, table in tables.items()
    }
    refuse(tables, [*_rules_of(options, labels), *rules], gather=gather)
    # With bounds, all rows may have the same lower bound.
    [*bounds, label] = options.labels.values()
    if not bounds and is_constant(tables["train"].column(label), gather=gather) and is_logging_rank:
        logger.warning(
            "All rows of 'train' have the same label in the column %r: a model learns nothing.",
            label,
        )
    warn_of_numbers_as_text(
        tables["train"], features, gather=gather, is_logging_rank=is_logging_rank
    )
    return tables


def refuse(tables: Mapping[str, pa.Table], rules: Sequence[Rule], *, gather: Gather) -> None:
    """Raise an error if any value breaks a rule.

    Raises:
        BadDataError: the same on every rank, if a row of any rank breaks a rule.
    """
    mine = {
        name: (len(table), [rule.find(table.column(rule.column)) for rule in rules])
        for name, table in tables.items()
    }
    by_rank = gather(mine)
    problems = []
    for name in by_rank[0]:
        parts = [each[name] for each in by_rank if name in each]
        rows = sum(rows for rows, _ in parts)
        for rule, *found in zip(rules, *(found for _, found in parts), strict=True):
            broken = sum(each.rows for each in found)
            if broken and (broken == rows or not rule.only_if_all):
                examples = [each.example for each in found if each.example is not None]
                problems.append(_problem(rule, name, f"{broken} of {rows}", examples[:1]))
    if problems:
        raise BadDataError(tuple(problems))


def is_constant(column: pa.ChunkedArray, *, gather: Gather) -> bool:
    """Return whether all rows of all ranks have the same number. Every rank calls it."""
    numbers = floats(column)
    ends = gather((float(numbers.min()), float(numbers.max())) if len(numbers) else None)
    return len({end for pair in ends if pair is not None for end in pair}) == 1


def _rules_of(options: Booster, labels: Labels | None) -> list[Rule]:
    """Return the rules for the columns that aren't features."""
    rules = []
    for option, column in options.labels.items():
        rules += required(option, column, may_be_infinite=option == "label_upper_bound")
        if labels is not None:
            rules.append(labels.rule(option, column))
    if options.weight is not None:
        rules += weights("weight", options.weight)
    if options.score_column is not None:
        rules += required(options.score_option, options.score_column)
    return rules


def _problem(rule: Rule, dataset: str, rows: str, examples: Sequence[float]) -> Problem:
    such_as = "".join(f" (such as {example:g})" for example in examples)
    return Problem(
        field=rule.option or f"datasets[{dataset!r}]",
        what=f"in {rows} rows of {dataset!r} the column {rule.column!r} {rule.what}{such_as}",
        remedy=rule.remedy,
    )
