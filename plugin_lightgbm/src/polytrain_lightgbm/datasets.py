"""Converts tables to LightGBM's data sets, with the same bins on every rank.

LightGBM itself bins each feature by the rows of one worker: the bins are bad if rows are sorted,
and the model depends on how the rows are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa

from polytrain.boosting.columns import (
    Numbers,
    agreed_categories,
    codes_of,
    floats,
    plainly_typed,
    selected,
    with_columns,
    with_numbers,
)
from polytrain.boosting.sampling import Mask, RowNumbers, agreed_numbers, agreed_sample
from polytrain.boosting.table_validation import validated
from polytrain.extension import BadDataError, group_sizes
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.collective import Collective
from polytrain_lightgbm.first_score import FirstScore
from polytrain_lightgbm.labels import labels
from polytrain_lightgbm.names import as_lightgbm_has_it, renamed
from polytrain_lightgbm.network import by_itself
from polytrain_lightgbm.parameters import value
from polytrain_plugins import Problem


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a data set, or a rank's part of them."""

    table: pa.Table
    """The columns, all numeric: categories are codes."""

    options: LightGBM

    @cached_property
    def features(self) -> list[str]:
        """The names of the features."""
        return self.options.features_of(self.table.column_names)

    @cached_property
    def labels(self) -> Numbers:
        """The labels, float32, shape `[rows]`."""
        assert self.options.label is not None
        return _single(self.table, self.options.label)

    @cached_property
    def weights(self) -> Numbers | None:
        """The weights, float32, shape `[rows]`; None without weights."""
        return None if self.options.weight is None else _single(self.table, self.options.weight)

    @cached_property
    def first_scores(self) -> Numbers | None:
        """The user's initial scores, float64, shape `[rows]`; None without them."""
        column = self.options.init_score
        return None if column is None else floats(self.table.column(column))

    @cached_property
    def query_sizes(self) -> Numbers | None:
        """The number of rows of each query, shape `[queries]`; None without queries."""
        column = self.options.group
        return None if column is None else group_sizes(self.table.column(column))

    def leaves(self, booster: lightgbm.Booster, iteration: int) -> Numbers:
        """Return each row's leaf in an iteration's only tree; int32, shape `[rows]`."""
        return _Batches(self.table.select(self.features)).leaves(booster, iteration)

    @property
    def counting(self) -> slice | Mask:
        """The rows with a weight above 0: others can make LightGBM's `average_precision` NaN."""
        return slice(None) if self.weights is None else self.weights > 0

    @property
    def row_weight(self) -> float:
        """The total weight of these rows, for a metric that is a mean over rows."""
        return float(len(self.table)) if self.weights is None else float(self.weights.sum())

    @property
    def query_weight(self) -> float:
        """The total weight of these queries, for a metric that is their mean; or of the rows."""
        sizes = self.query_sizes
        if sizes is None or self.weights is None:
            return self.row_weight if sizes is None else float(len(sizes))
        # As in LightGBM, a query's weight is the mean weight of its rows.
        return float((np.add.reduceat(self.weights, np.cumsum(sizes) - sizes) / sizes).sum())


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Everything that all ranks agree on before they bin their rows."""

    categories: Mapping[str, pa.Array]
    reference: lightgbm.Dataset
    """The data set whose bins all others use."""

    numbers: RowNumbers
    """Numbers of the rank's rows of "train" in the whole data set."""

    rows: Mapping[str, Rows]
    """The rank's part of "train"; on rank 0, all rows of the other data sets."""

    def dataset(
        self,
        rows: Rows,
        first_score: FirstScore | None,
        model: lightgbm.Booster | None,
        *,
        begins_with_model: bool,
    ) -> lightgbm.Dataset:
        """Return a data set with the common bins.

        Args:
            first_score: the estimated initial score of all rows; None if none was estimated.
            model: model to resume from, whose predictions are part of the initial scores.
            begins_with_model: whether the run started from the user's model, whose predictions
                then replace the user's initial scores.
        """
        features = _Batches(rows.table.select(rows.features))
        scores = None if begins_with_model else rows.first_scores
        if model is None:
            scores = scores if first_score is None else first_score.of_rows(len(features))
        elif scores is None:
            scores = features.predicted(model)
        else:
            scores = features.added_to(scores, model)
        dataset = lightgbm.Dataset(
            features,
            label=rows.labels,
            weight=rows.weights,
            group=rows.query_sizes,
            init_score=scores,
            feature_name=[as_lightgbm_has_it(name) for name in rows.features],
            reference=self.reference,
            params=self.reference.params,
        )
        return dataset.construct()


def agreed(
    tables: Mapping[str, pa.Table],
    *,
    options: LightGBM,
    params: Mapping[str, Any],
    collective: Collective,
    model: lightgbm.Booster | None,
) -> Agreement:
    """Agree with all ranks on categories and bins.

    Args:
        tables: a rank's shard "train"; on rank 0, all rows of every other data set.
        options: the options, which name the columns.
        params: LightGBM's parameters, except the network's.
        collective: connects all ranks, which all call this function.
        model: model to resume from.

    Raises:
        BadDataError: on every rank, if some values can't be trained on.
        ValueError: the model has other features.
    """
    names = options.features_of(tables["train"].column_names)
    tables = validated(
        tables,
        options,
        labels=labels(options.params),
        gather=collective.all_gather,
        is_logging_rank=collective.rank == 0,
    )
    categories = agreed_categories(
        tables, features=names, also=options.categorical, gather=collective.all_gather
    )
    if model is not None:
        _check_outputs(model, params)
        categories = _with_those_of(model, categories, names)
    rows = {
        name: Rows(table=_in_numbers(table, categories), options=options)
        for name, table in tables.items()
    }
    mine = rows["train"]
    queries = 0 if mine.query_sizes is None else len(mine.query_sizes)
    numbers = agreed_numbers(
        rows=len(mine.table), queries=queries, rank=collective.rank, gather=collective.all_gather
    )
    sample = agreed_sample(mine.table.select(names), numbers, options, gather=collective.all_gather)
    return Agreement(
        categories=categories,
        reference=by_itself(_reference, sample, categories, params),
        numbers=numbers,
        rows=rows,
    )


def halves(table: pa.Table, group: str | None) -> tuple[pa.Table, pa.Table]:
    """Split a table into two parts, each with whole queries.

    Raises:
        BadDataError: the table has only one row or query.
    """
    cut = len(table) // 2
    if group is not None:
        ends = np.cumsum(group_sizes(table.column(group)))
        cut = int(ends[len(ends) // 2 - 1]) if len(ends) > 1 else 0
    if cut == 0:
        unit = "row" if group is None else "query"
        problem = Problem(
            field="datasets['train']",
            what=f"it has one {unit}, and training needs two or more",
            remedy="Give it two or more",
        )
        raise BadDataError((problem,))
    return table.slice(0, cut), table.slice(cut)


def predicted(model: lightgbm.Booster, table: pa.Table, **options: Any) -> Numbers:
    """Return a model's predictions for a table. Columns are matched by name.

    Args:
        model: the model, which has its own lists of categories.
        table: the rows.
        options: arguments of `lightgbm.Booster.predict`.
    """
    names = model.feature_name()
    lists = model.pandas_categorical or []
    # A model without lists takes the numbers of categories themselves.
    columns = (model.params.get("categorical_feature") or []) if lists else []
    categories = {
        names[column]: pa.array(values) for column, values in zip(columns, lists, strict=True)
    }
    features = selected(renamed(table), names)
    features = with_numbers(features, [name for name in names if name not in categories])
    features = plainly_typed(features, names)
    features = _in_numbers(features, categories)
    return np.asarray(model.predict(_dense(features), **options))


def _reference(
    sample: pa.Table, categories: Mapping[str, pa.Array], params: Mapping[str, Any]
) -> lightgbm.Dataset:
    reference = lightgbm.Dataset(
        _dense(sample),
        label=np.zeros(len(sample)),
        feature_name=[as_lightgbm_has_it(name) for name in sample.column_names],
        categorical_feature=[as_lightgbm_has_it(name) for name in categories],
        # Use all rows: they are a sample already.
        params={**params, "bin_construct_sample_cnt": max(1, len(sample))},
    )
    # As for a pandas frame with categories, so that the model accepts such a frame.
    reference.pandas_categorical = [values.to_pylist() for values in categories.values()]
    return reference.construct()


def _check_outputs(model: lightgbm.Booster, params: Mapping[str, Any]) -> None:
    """Raise ValueError if the model has another number of scores for each row than the run."""
    have, want = model.num_model_per_iteration(), int(value(params, "num_class") or 1)
    if have != want:
        raise ValueError(
            f"The model to continue gives {have} score(s) for each row, and this run {want}: one "
            "for each class. Set the objective and 'num_class' as the model was trained."
        )


def _with_those_of(
    model: lightgbm.Booster, categories: Mapping[str, pa.Array], names: Sequence[str]
) -> dict[str, pa.Array]:
    """Return the categories, the model's first: its trees refer to categories by number."""
    if model.feature_name() != [as_lightgbm_has_it(name) for name in names]:
        raise ValueError(
            f"The model to continue has the features {', '.join(model.feature_name())}; those of "
            f"the data are {', '.join(names)}. Give it the columns that the model was trained on."
        )
    known = model.pandas_categorical or []
    if len(known) != len(categories):
        raise ValueError(
            f"The model to continue has {len(known)} column(s) of categories; the data has "
            f"{len(categories)}: {', '.join(categories)}. Set categorical=[…] as it was."
        )
    return {
        name: pa.array([*dict.fromkeys([*old, *values.to_pylist()])])
        for old, (name, values) in zip(known, categories.items(), strict=True)
    }


class _Batches(lightgbm.Sequence):
    """Gives LightGBM rows batch by batch, so that they are never all copied at once."""

    batch_size = 50_000

    def __init__(self, features: pa.Table) -> None:
        self._features = features

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, rows: Any) -> Numbers:
        return _dense(self._features.slice(rows.start, rows.stop - rows.start))

    def predicted(self, model: lightgbm.Booster) -> Numbers:
        """Return the model's raw scores, shape `[classes * rows]`, class by class."""
        # Use all trees: by default LightGBM predicts with those up to the best round.
        every = self._predictions(model, raw_score=True, num_iteration=-1)
        return np.concatenate(every).T.ravel()

    def leaves(self, model: lightgbm.Booster, iteration: int) -> Numbers:
        """Return each row's leaf in an iteration's only tree; int32, shape `[rows]`."""
        how = {"pred_leaf": True, "start_iteration": iteration, "num_iteration": 1}
        return np.concatenate(self._predictions(model, **how)).ravel().astype(np.int32)

    def _predictions(self, model: lightgbm.Booster, **how: Any) -> list[Numbers]:
        return [model.predict(self[rows], **how) for rows in self._slices(self.batch_size)]

    def added_to(self, scores: Numbers, model: lightgbm.Booster) -> Numbers:
        """Return scores plus the trees' outputs, added tree by tree as in training: the last bits
        depend on the order."""
        added = scores.copy()
        # Fewer rows at once: each row has a leaf for each tree.
        for rows in self._slices(self.batch_size // 10):
            leaves = model.predict(self[rows], pred_leaf=True, num_iteration=-1).astype(int)
            for tree, of_tree in enumerate(leaves.T):
                outputs = [model.get_leaf_output(tree, leaf) for leaf in range(of_tree.max() + 1)]
                added[rows] += np.array(outputs)[of_tree]
        return added

    def _slices(self, size: int) -> list[slice]:
        return [slice(start, start + size) for start in range(0, len(self), size)]


def _in_numbers(table: pa.Table, categories: Mapping[str, pa.Array]) -> pa.Table:
    return with_columns(
        table, {name: codes_of(table.column(name), values) for name, values in categories.items()}
    )


def _dense(features: pa.Table) -> Numbers:
    """Return features as float64, shape `[rows, features]`, NaN for nulls."""
    dense = np.empty((len(features), features.num_columns))
    for index, column in enumerate(features.columns):
        dense[:, index] = column.cast(pa.float64(), safe=False).to_numpy()
    return dense


def _single(table: pa.Table, column: str) -> Numbers:
    return floats(table.column(column)).astype(np.float32)
