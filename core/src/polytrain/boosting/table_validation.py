"""Checks values before training, and raises the same error on all ranks.

Without these checks, a framework fails on one rank while the others wait, or accepts wrong values
and trains a wrong model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pyarrow as pa

from polytrain.boosting.booster import Booster
from polytrain.boosting.categories import Gather
from polytrain.boosting.numbers import floats, plainly_typed, without_categories
from polytrain.boosting.table_rules import Labels, Rule, required, weights
from polytrain.boosting.text_columns import warn_of_numbers_as_text
from polytrain.errors import BadDataError
from polytrain_plugins import Problem

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
        options: the options, which name the columns.
        labels: the labels that the objective takes; None to skip this check.
        rules: further rules of the framework.
        gather: gathers an object from all ranks, which all call this function.
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

    Args:
        tables: a rank's shard "train"; on rank 0, all rows of every other data set.
        rules: the rules, the same on every rank.
        gather: gathers an object from all ranks, which all call this function.

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
