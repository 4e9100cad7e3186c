"""From tables as users give them to tables that boosters train on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pyarrow as pa

from polytrain.boosting.categories import Gather
from polytrain.boosting.numbers import plainly_typed
from polytrain.boosting.table_validation import Rule, is_constant, refuse

logger = logging.getLogger(__name__)


def admitted(
    tables: Mapping[str, pa.Table],
    *,
    features: Sequence[str],
    label: str,
    rules: Sequence[Rule],
    gather: Gather,
    is_logging_rank: bool,
) -> dict[str, pa.Table]:
    """The tables with the columns of "train", in its order, and in types that frameworks know.

    Args:
        tables: a rank's shard "train"; on rank 0, all rows of every other data set.
        features: columns that are trained on.
        label: column to predict. If all rows have the same, that is worth a warning.
        rules: what the values must not be like.
        gather: of all ranks, each of which calls this.
        speaks: whether this rank warns for all.

    Raises:
        BadDataError: on every rank, if a row of any breaks a rule.
    """
    names = tables["train"].column_names
    tables = {name: plainly_typed(table.select(names), features) for name, table in tables.items()}
    refuse(tables, rules, gather=gather)
    if is_constant(tables["train"].column(label), gather=gather) and is_logging_rank:
        logger.warning(
            "All rows of 'train' have the same label in the column %r: there is nothing to learn.",
            label,
        )
    return tables
