"""From tables to XGBoost's matrices: the same bins on every rank.

Left alone, every rank would bin its own rows, and XGBoost would merge what came of it: other bins,
and another model, for every way in which the rows can be split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xgboost

from polytrain.boosting.categories import agreed_categories, encoded, selected
from polytrain.boosting.numbers import floats, plainly_typed
from polytrain.boosting.row_draws import Mask
from polytrain.boosting.sampling import agreed_sample
from polytrain.extension import group_sizes
from polytrain_xgboost.admission import admitted_tables
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.collecting import Ranks
from polytrain_xgboost.continuing import trees_of, with_those_of
from polytrain_xgboost.external import Pages
from polytrain_xgboost.outside import Outside


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What one rank trains on, and evaluates on."""

    train: xgboost.QuantileDMatrix
    evaluated: Mapping[str, xgboost.QuantileDMatrix]
    """All rows of the other data sets, on rank 0."""

    has_others: bool
    """Whether there are such data sets."""

    first_row: int
    """Number of its first row in the whole data set; with queries, of its first query."""

    facts: Mapping[str, Any]
    """What is known of its rows besides the features, as XGBoost takes it."""

    @cached_property
    def weights(self) -> np.ndarray[Any, Any]:
        """The weight of each of its rows, or of its queries, before any is drawn."""
        weights = self.train.get_weight()
        if len(weights):
            return weights
        return np.ones(self._queries or self.train.num_row(), np.float32)

    def by_row(self, mask: Mask) -> Mask:
        """What is said of rows, or of queries, for each of the rows."""
        if not self._queries:
            return mask
        return np.repeat(mask, np.diff(self.train.get_uint_info("group_ptr")))

    @property
    def _queries(self) -> int:
        """How many it has; 0 if rows stand for themselves."""
        return max(0, len(self.train.get_uint_info("group_ptr")) - 1)


def training_data(
    tables: Mapping[str, pa.Table],
    *,
    options: XGBoost,
    params: Mapping[str, Any],
    ranks: Ranks,
    outside: Outside,
    model: xgboost.Booster | None,
    directory: Path | None,
) -> TrainingData:
    """Bin everything by one sample of all ranks' rows.

    Args:
        tables: a rank's shard "train"; on rank 0, all rows of every other data set.
        options: which columns mean what.
        params: XGBoost's parameters.
        ranks: all of which call this.
        outside: for what is done by each rank alone.
        model: trees to resume from.
        directory: for the bins of "train", with external memory; None to have them in memory.

    Raises:
        BadDataError: on every rank, if some values can't be trained on.
        ValueError: the trees are of other features, or don't know all categories.
    """
    tables = admitted_tables(tables, options, ranks)
    categories = _categories(tables, options, ranks, model)
    tables = {name: encoded(table, categories) for name, table in tables.items()}
    binning = _Binning(options=options, params=params)
    mine, facts = tables["train"], binning.facts(tables["train"])
    queries = int(facts["qid"][-1]) + 1 if options.qid and len(mine) else 0
    everybodys = np.array(ranks.gathered([len(mine), queries]))
    first_row, first_query = everybodys[: ranks.me].sum(axis=0).tolist()
    if options.qid is not None:
        facts["qid"] += first_query
    sample = _sample(mine, first_row, int(everybodys[:, 0].sum()), options, ranks)
    train = outside(binning.train, mine, facts, outside(binning.reference, sample), directory)
    return TrainingData(
        train=train,
        has_others=ranks.told(len(tables) > 1),
        evaluated={
            name: outside(binning.matrix, table, binning.facts(table), train)
            for name, table in tables.items()
            if name != "train"
        },
        first_row=first_row if options.qid is None else first_query,
        facts=facts,
    )


def reference(table: pa.Table, options: XGBoost) -> xgboost.QuantileDMatrix:
    """A matrix with the bins that a run on these rows has, at any number of workers."""
    ranks = Ranks()
    tables = admitted_tables({"train": table}, options, ranks)
    categories = _categories(tables, options, ranks, trees_of(options.xgb_model))
    table = encoded(tables["train"], categories)
    params = {"nthread": 0, **options.params}
    sample = _sample(table, 0, len(table), options, ranks)
    return _Binning(options=options, params=params).reference(sample)


def prediction_matrix(
    table: pa.Table, model: xgboost.Booster, *, base_margin: str | None
) -> xgboost.DMatrix:
    """A table's rows for a model: its columns by name, its own categories.

    Args:
        table: the rows; of a category that the model doesn't know, nothing is known.
        model: to predict them.
        base_margin: column with what each row begins with; left out where it isn't there.
    """
    lists = model.get_categories(export_to_arrow=True).to_arrow()
    categories = {name: values for name, values in lists if values is not None}
    names = model.feature_names or []
    margin = base_margin if base_margin in table.column_names else None
    return xgboost.DMatrix(
        encoded(plainly_typed(selected(table, names), names), categories),
        base_margin=_numbers(table, margin),
        enable_categorical=True,
    )


def _sample(mine: pa.Table, first_row: int, rows: int, options: XGBoost, ranks: Ranks) -> pa.Table:
    """The rows that bins are made from."""
    return agreed_sample(
        mine,
        first_row=first_row,
        rows=rows,
        size=options.bin_sample_rows,
        seed=options.seed,
        gather=ranks.gathered,
    )


def _categories(
    tables: Mapping[str, pa.Table],
    options: XGBoost,
    ranks: Ranks,
    model: xgboost.Booster | None,
) -> dict[str, pa.Array]:
    besides = options.columns_besides_features
    names = [name for name in tables["train"].column_names if name not in besides]
    categories = agreed_categories(
        tables, features=names, also=options.categorical, gather=ranks.gathered
    )
    # From Arrow XGBoost takes no numbers as categories, and no empty list of them.
    categories = {
        name: values.cast(pa.string()) if len(values) else pa.array([""])
        for name, values in categories.items()
    }
    return categories if model is None else with_those_of(model, categories, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Binning:
    options: XGBoost
    params: Mapping[str, Any]

    def matrix(
        self, table: pa.Table, facts: Mapping[str, Any], reference: xgboost.DMatrix
    ) -> xgboost.QuantileDMatrix:
        return self._quantiles(table, **facts, ref=reference)

    def train(
        self,
        table: pa.Table,
        facts: Mapping[str, Any],
        reference: xgboost.DMatrix,
        directory: Path | None,
    ) -> xgboost.QuantileDMatrix:
        if directory is None:
            return self.matrix(table, facts, reference)
        pages = Pages(self._features(table), facts, directory)
        return xgboost.ExtMemQuantileDMatrix(pages, ref=reference, **self._how)

    def facts(self, table: pa.Table) -> dict[str, Any]:
        """What `xgboost.DMatrix` takes beside the features."""
        options = self.options
        facts = {
            "label": _numbers(table, options.label),
            "weight": _numbers(table, options.weight),
            "base_margin": _numbers(table, options.base_margin),
        }
        if options.qid is not None:
            sizes = group_sizes(table.column(options.qid))
            # Numbers that grow, which is what XGBoost takes.
            facts["qid"] = np.repeat(np.arange(len(sizes)), sizes)
            if facts["weight"] is not None:
                # XGBoost weighs queries: the weight of each is that of its first row.
                facts["weight"] = facts["weight"][np.cumsum(sizes) - sizes]
        return {name: values for name, values in facts.items() if values is not None}

    def reference(self, sample: pa.Table) -> xgboost.QuantileDMatrix:
        """A matrix whose bins all others take. Rows count by their weight, if they have one."""
        weight = None if self.options.qid else _numbers(sample, self.options.weight)
        return self._quantiles(sample, weight=weight)

    def _quantiles(self, table: pa.Table, **facts: Any) -> xgboost.QuantileDMatrix:
        return xgboost.QuantileDMatrix(self._features(table), **facts, **self._how)

    def _features(self, table: pa.Table) -> pa.Table:
        others = self.options.columns_besides_features
        return table.drop_columns([column for column in others if column in table.column_names])

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "max_bin": self.params.get("max_bin", 256),
            "nthread": self.params["nthread"],
            "enable_categorical": True,
        }


def _numbers(table: pa.Table, column: str | None) -> Any:
    return None if column is None else floats(table.column(column))
