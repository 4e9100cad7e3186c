"""Converts tables to XGBoost's matrices, with the same bins on every rank.

XGBoost itself bins the rows of each rank and merges the bins, so the bins and the model depend on
how the rows are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xgboost

from polytrain.boosting.columns import (
    agreed_categories,
    as_text,
    encoded,
    floats,
    plainly_typed,
    selected,
    with_columns,
    with_numbers,
)
from polytrain.boosting.sampling import Mask, RowNumbers, agreed_numbers, agreed_sample
from polytrain.boosting.table_validation import finite, validated
from polytrain.extension import group_sizes
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.collective import Outside, Ranks
from polytrain_xgboost.continuing import trees_of, with_those_of
from polytrain_xgboost.cuts import Ends, cuts_of, ends_of, joined_ends, splits_of, table_for
from polytrain_xgboost.external import Pages
from polytrain_xgboost.labels import labels, refuse_crossed, refuse_uneven


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of one rank, for training and evaluation."""

    train: xgboost.QuantileDMatrix
    max_bin: int
    """Maximum number of bins of a feature, for XGBoost's parameter of this name."""

    evaluated: Mapping[str, xgboost.DMatrix]
    """On rank 0, all rows of the evaluation sets; elsewhere empty."""

    has_others: bool
    """Whether the run has evaluation sets; the same on every rank."""

    first_row: int
    """Number of the rank's first row in the whole data set; with queries, of its first query."""

    facts: Mapping[str, Any]
    """Argument of `xgboost.DMatrix`, such as "label" → its array for the rank's rows."""

    @cached_property
    def weights(self) -> np.ndarray[Any, Any]:
        """The weights before rows are drawn, float32, shape `[rows]` or `[queries]`."""
        weights = self.train.get_weight()
        if len(weights):
            return weights
        return np.ones(self._queries or self.train.num_row(), np.float32)

    def by_row(self, mask: Mask) -> Mask:
        """Convert a mask of rows or of queries to a mask of shape `[rows]`."""
        if not self._queries:
            return mask
        return np.repeat(mask, np.diff(self.train.get_uint_info("group_ptr")))

    @property
    def _queries(self) -> int:
        """Number of the rank's queries; 0 without queries."""
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
    """Bin all data sets by one sample of all ranks' rows.

    Args:
        tables: a rank's shard "train"; on rank 0, all rows of every other data set.
        options: the options, which name the columns.
        params: XGBoost's parameters.
        ranks: all ranks, which all call this function.
        outside: makes calls outside the collective.
        model: model to resume from.
        directory: directory for the bins of "train", with external memory; None for memory.

    Raises:
        BadDataError: on every rank, if some values can't be trained on.
        ValueError: the model has other features, or doesn't know all categories.
    """
    tables = _validated(tables, options, ranks)
    categories = _categories(tables, options, ranks, model)
    tables = {name: encoded(table, categories) for name, table in tables.items()}
    binning = _Binning(options=options, params=params)
    mine, facts = tables["train"], binning.facts(tables["train"])
    queries = int(facts["qid"][-1]) + 1 if options.qid and len(mine) else 0
    numbers = agreed_numbers(rows=len(mine), queries=queries, rank=ranks.me, gather=ranks.gathered)
    if options.qid is not None:
        facts["qid"] += numbers.first_query
    highest = _highest_categories(mine, options, ranks)
    sample = _sample(mine, highest, numbers, options, ranks)
    own_bins = outside(binning.reference, sample)
    reference = own_bins
    if model is not None:
        ends = joined_ends(ranks.gathered(binning.ends(mine)))
        reference = outside(binning.reference_for, model, own_bins, sample, ends)
    train = outside(binning.train, mine, facts, reference, directory)
    if options.feature_weights is not None:
        train.set_info(feature_weights=options.feature_weights)
    # Trees from other bins may have thresholds outside the range of the training rows.
    shared_bins = train if reference is own_bins else None

    def bins_for(table: pa.Table) -> xgboost.QuantileDMatrix | None:
        # More bins for its own categories would change how trees split those of "train".
        has_bins = all(_highest_code(table.column(name)) <= highest[name] for name in highest)
        return shared_bins if has_bins else None

    return TrainingData(
        train=train,
        max_bin=reference.max_bin,
        has_others=ranks.broadcast(len(tables) > 1),
        evaluated={
            name: outside(binning.matrix, table, binning.facts(table), bins_for(table))
            for name, table in tables.items()
            if name != "train"
        },
        first_row=numbers.first_row if options.qid is None else numbers.first_query,
        facts=facts,
    )


def reference(table: pa.Table, options: XGBoost) -> xgboost.QuantileDMatrix:
    """Return a matrix with the bins of a run on these rows, at any number of workers."""
    ranks, model = Ranks(), trees_of(options.xgb_model)
    tables = _validated({"train": table}, options, ranks)
    categories = _categories(tables, options, ranks, model)
    table = encoded(tables["train"], categories)
    params = {"nthread": 0, **options.params}
    numbers = agreed_numbers(rows=len(table), queries=0, rank=ranks.me, gather=ranks.gathered)
    highest = _highest_categories(table, options, ranks)
    sample = _sample(table, highest, numbers, options, ranks)
    binning = _Binning(options=options, params=params)
    own_bins = binning.reference(sample)
    if model is None:
        return own_bins
    return binning.reference_for(model, own_bins, sample, binning.ends(table))


def features_of(model: xgboost.Booster) -> list[str]:
    """Return the names of a model's features, in their order.

    Raises:
        ValueError: it has none.
    """
    if model.feature_names is None:
        raise ValueError(
            "The model doesn't know the names of its features: it was trained on an array. Pass "
            "feature_names=[…] to the xgboost.DMatrix that it is trained on, or predict with "
            "result.load_model().predict(…)."
        )
    return list(model.feature_names)


def prediction_matrix(
    table: pa.Table, model: xgboost.Booster, *, base_margin: str | None
) -> xgboost.DMatrix:
    """Return a matrix of a table's rows, with the columns and categories of a model.

    Args:
        table: the rows; categories that the model doesn't know become missing values.
        model: the model that predicts them.
        base_margin: column with each row's initial score; ignored if the table lacks it.
    """
    lists = model.get_categories(export_to_arrow=True).to_arrow()
    categories = {name: values for name, values in lists if values is not None}
    names = features_of(model)
    margin = base_margin if base_margin in table.column_names else None
    features = with_numbers(
        selected(table, names), [name for name in names if name not in categories]
    )
    return xgboost.DMatrix(
        encoded(plainly_typed(features, names), categories),
        base_margin=_numbers(table, margin),
        enable_categorical=True,
    )


def _validated(
    tables: Mapping[str, pa.Table], options: XGBoost, ranks: Ranks
) -> dict[str, pa.Table]:
    """Return the tables; raise BadDataError if XGBoost can't train on them."""
    schema = tables["train"].schema
    features = pa.schema([schema.field(name) for name in options.features_of(schema.names)])
    checked = validated(
        tables,
        options,
        labels=labels(options.params) if options.obj is None else None,
        rules=finite(features, "XGBoost"),
        gather=ranks.gathered,
        is_logging_rank=ranks.me == 0,
    )
    if len(options.labels) > 1:
        refuse_crossed(checked, options, gather=ranks.gathered)
    if options.qid is not None and options.weight is not None:
        refuse_uneven(checked, options, gather=ranks.gathered)
    return checked


def _categories(
    tables: Mapping[str, pa.Table],
    options: XGBoost,
    ranks: Ranks,
    model: xgboost.Booster | None,
) -> dict[str, pa.Array]:
    names = options.features_of(tables["train"].column_names)
    categories = agreed_categories(
        tables, features=names, also=options.categorical, gather=ranks.gathered
    )
    # For Arrow tables, XGBoost needs categories that are strings, and at least one.
    categories = {
        name: as_text(values) if len(values) else pa.array([""])
        for name, values in categories.items()
    }
    return categories if model is None else with_those_of(model, categories, names)


def _highest_categories(table: pa.Table, options: XGBoost, ranks: Ranks) -> dict[str, int]:
    """Return the highest number of a category in all ranks' rows, by column; -1 without one."""
    names = [
        name
        for name in options.features_of(table.column_names)
        if pa.types.is_dictionary(table.schema.field(name).type)
    ]
    by_rank = ranks.gathered([_highest_code(table.column(name)) for name in names])
    return {name: max(codes) for name, *codes in zip(names, *by_rank, strict=True)}


def _highest_code(column: pa.ChunkedArray) -> int:
    codes = (pc.max(chunk.indices).as_py() for chunk in column.chunks)
    return max((code for code in codes if code is not None), default=-1)


def _sample(
    mine: pa.Table,
    highest: Mapping[str, int],
    numbers: RowNumbers,
    options: XGBoost,
    ranks: Ranks,
) -> pa.Table:
    """Return the rows to make bins from, and one with the highest category of each column.

    XGBoost makes bins for the categories up to the highest that it sees, and takes higher ones
    for that one. These are in rows that aren't in the sample.
    """
    sample = agreed_sample(mine, numbers, options, gather=ranks.gathered)
    if not highest:
        return sample
    # Missing values of the other features change no bins.
    row: dict[str, pa.Array] = {
        name: pa.nulls(1, sample.schema.field(name).type)
        for name in options.features_of(sample.column_names)
    }
    for name, number in highest.items():
        code = pa.array([number if number >= 0 else None], pa.int32())
        row[name] = pa.DictionaryArray.from_arrays(code, sample.column(name).chunk(0).dictionary)
    return pa.concat_tables([sample, with_columns(sample.slice(0, 1), row)]).combine_chunks()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Binning:
    options: XGBoost
    params: Mapping[str, Any]

    def matrix(
        self, table: pa.Table, facts: Mapping[str, Any], bins: xgboost.QuantileDMatrix | None
    ) -> xgboost.DMatrix:
        """Return a matrix with the bins of `bins`, or with unbinned values if it is None."""
        if bins is None:
            how = {name: value for name, value in self._how.items() if name != "max_bin"}
            return xgboost.DMatrix(self._features(table), **facts, **how)
        return self._quantiles(table, **facts, ref=bins, max_bin=bins.max_bin)

    def train(
        self,
        table: pa.Table,
        facts: Mapping[str, Any],
        reference: xgboost.QuantileDMatrix,
        directory: Path | None,
    ) -> xgboost.QuantileDMatrix:
        if directory is None:
            return self.matrix(table, facts, reference)
        pages = Pages(self._features(table), facts, directory)
        how = {**self._how, "max_bin": reference.max_bin}
        return xgboost.ExtMemQuantileDMatrix(pages, ref=reference, **how)

    def facts(self, table: pa.Table) -> dict[str, Any]:
        """Return `xgboost.DMatrix`'s arguments for labels, weights, margins and queries."""
        options = self.options
        facts = {
            **{option: _numbers(table, column) for option, column in options.labels.items()},
            "weight": _numbers(table, options.weight),
            "base_margin": _numbers(table, options.base_margin),
        }
        if options.qid is not None:
            sizes = group_sizes(table.column(options.qid))
            # XGBoost needs query numbers in ascending order.
            facts["qid"] = np.repeat(np.arange(len(sizes)), sizes)
            if facts["weight"] is not None:
                # XGBoost takes one weight for each query; those of its rows are equal.
                facts["weight"] = facts["weight"][np.cumsum(sizes) - sizes]
        return {name: values for name, values in facts.items() if values is not None}

    def reference(self, sample: pa.Table) -> xgboost.QuantileDMatrix:
        """Return the matrix whose bins all others use; weights count if there are no queries."""
        weight = None if self.options.qid else _numbers(sample, self.options.weight)
        return self._quantiles(sample, weight=weight)

    def reference_for(
        self,
        model: xgboost.Booster,
        own_bins: xgboost.QuantileDMatrix,
        sample: pa.Table,
        ends: Sequence[Ends | None],
    ) -> xgboost.QuantileDMatrix:
        """Return a matrix with bins such that a model's trees decide as on unbinned values.

        Args:
            model: model to resume from.
            own_bins: the bins of the run's own rows; returned if they already suffice.
            sample: the sample that `own_bins` was made from.
            ends: the lowest and the highest value of each feature in the rows of all ranks.
        """
        features, splits = self._features(sample), splits_of(model)
        cuts = cuts_of(own_bins, features)
        if not any(cuts[feature].lacks_some_of(some) for feature, some in splits.items()):
            return own_bins
        table = table_for(cuts, splits, ends, features)
        return self._quantiles(table, max_bin=max(own_bins.max_bin, len(table)))

    def ends(self, table: pa.Table) -> list[Ends | None]:
        """Return the lowest and the highest value of each feature."""
        return [ends_of(column) for column in self._features(table)]

    def _quantiles(self, table: pa.Table, **facts: Any) -> xgboost.QuantileDMatrix:
        return xgboost.QuantileDMatrix(self._features(table), **{**self._how, **facts})

    def _features(self, table: pa.Table) -> pa.Table:
        others = self.options.columns_besides_features
        names = set(table.column_names)
        return table.drop_columns([column for column in others if column in names])

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "max_bin": self.params.get("max_bin", 256),
            "nthread": self.params["nthread"],
            "enable_categorical": True,
        }


def _numbers(table: pa.Table, column: str | None) -> Any:
    return None if column is None else floats(table.column(column))
