"""Makes bins such that a given model's trees decide as they do on unbinned values.

On a binned row, XGBoost uses the lower edge of a value's bin as the value. So a tree from other
bins decides wrongly, unless its thresholds are edges too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xgboost

from polytrain.boosting.columns import Numbers, floats

_ROUNDS_AT_ONCE = 100
"""Number of rounds to read as JSON at once: it takes many times the model's own memory."""

Ends = tuple[float, float]
"""The lowest and the highest value of a feature of numbers."""

Splits = Mapping[int, Numbers]
"""Feature's number → the thresholds in a model's splits on the feature, if it is one of numbers.
float32, ascending, shape `[splits]`."""


def splits_of(model: xgboost.Booster) -> Splits:
    """Return the distinct thresholds in the splits of a model's trees."""
    found: dict[int, list[Numbers]] = {}
    for start in range(0, model.num_boosted_rounds(), _ROUNDS_AT_ONCE):
        end = min(start + _ROUNDS_AT_ONCE, model.num_boosted_rounds())
        learner = json.loads(model[start:end].save_raw("json"))["learner"]
        booster = learner["gradient_booster"]
        # DART's JSON holds its trees in a nested "gbtree".
        trees = booster.get("gbtree", booster)["model"]["trees"]
        features, values = _thresholds(trees)
        for feature in np.unique(features):
            found.setdefault(int(feature), []).append(np.unique(values[features == feature]))
    return {
        feature: np.unique(np.concatenate(some)).astype(np.float32)
        for feature, some in found.items()
    }


def _thresholds(trees: Sequence[Mapping[str, Any]]) -> Numbers:
    """Return the feature and the threshold of each numeric split, shape `[2, splits]`."""
    names = ("split_indices", "split_conditions", "left_children", "split_type")
    features, values, left, kind = (
        np.fromiter(itertools.chain.from_iterable(tree[name] for tree in trees), float)
        for name in names
    )
    return np.stack([features, values])[:, (left >= 0) & (kind == 0)]


_NONE = np.array([], np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The bins that XGBoost has made for a feature."""

    edges: Numbers
    """float32, ascending. For numbers, the first bin's lower bound and all bins' upper edges, shape
    `[bins + 1]`. For categories, their numbers."""

    ends: Ends | None
    """Lowest and highest of the values that the bins were made from; None without values."""

    is_category: bool

    def lacks_some_of(self, splits: Numbers) -> bool:
        """Return whether some of these splits aren't edges of these bins. All categories are."""
        return not self.is_category and not np.isin(splits, self.edges).all()

    def values(self, splits: Numbers, ends: Ends | None) -> Numbers:
        """Return values for XGBoost to make bins from, so that these splits decide correctly.

        Splits of trees grown on these bins add no values, so a restart has the same bins.

        Args:
            splits: thresholds in the trees' splits on the feature.
            ends: ends of the rows to bin; None if none of them has a value.
        """
        edges = self.edges
        if self.is_category:
            return np.arange(edges[-1] + 1, dtype=np.float32)
        # XGBoost puts an edge at each value except the first, and one above the last.
        unchanged = np.unique(np.array([*(self.ends or ()), *edges[1:-1]], np.float32))
        if ends is None:
            return unchanged
        low, high = np.float32(min(ends[0], edges[0])), np.float32(ends[1])
        needed = splits[(splits > low) & (splits <= high)]
        if np.isin(needed, [*edges, *unchanged]).all():
            return unchanged
        inner = np.concatenate([edges, needed, [high]])
        # The first bin stays empty: its lower bound may exceed a threshold that is below all rows.
        below = [np.nextafter(low, np.float32(-np.inf)), low]
        return np.unique(np.concatenate([below, inner[(inner > low) & (inner <= high)]]))


def cuts_of(matrix: xgboost.QuantileDMatrix, sample: pa.Table) -> list[Cuts]:
    """Return a matrix's bins, feature by feature.

    Args:
        matrix: a matrix with bins.
        sample: the features that the bins were made from.
    """
    starts, edges = matrix.get_quantile_cut()
    return [
        Cuts(
            edges=edges[start:end],
            ends=ends_of(column),
            is_category=pa.types.is_dictionary(column.type),
        )
        for (start, end), column in zip(
            itertools.pairwise(map(int, starts)), sample.columns, strict=True
        )
    ]


def ends_of(column: pa.ChunkedArray) -> Ends | None:
    """Return the lowest and the highest value of a feature; None without numbers."""
    if pa.types.is_dictionary(column.type):
        return None
    numbers = floats(pc.drop_null(column))
    numbers = numbers[~np.isnan(numbers)]
    return (float(numbers.min()), float(numbers.max())) if len(numbers) else None


def joined_ends(by_rank: Sequence[Sequence[Ends | None]]) -> list[Ends | None]:
    """Return the ends of each feature over all ranks."""
    joined: list[Ends | None] = []
    for of_feature in zip(*by_rank, strict=True):
        found = [ends for ends in of_feature if ends is not None]
        lows, highs = ([ends[side] for ends in found] for side in (0, 1))
        joined.append((min(lows), max(highs)) if found else None)
    return joined


def table_for(
    cuts: Sequence[Cuts], splits: Splits, ends: Sequence[Ends | None], sample: pa.Table
) -> pa.Table:
    """Return a table for XGBoost to make bins from, so that all splits decide correctly.

    Args:
        cuts: the bins of the sample, by feature.
        splits: thresholds in the trees' splits.
        ends: ends of all ranks' rows, by feature.
        sample: the sample, for the names of its features and its categories.
    """
    columns = [
        its_cuts.values(splits.get(feature, _NONE), its_ends)
        for feature, (its_cuts, its_ends) in enumerate(zip(cuts, ends, strict=True))
    ]
    rows = max(map(len, columns))
    return pa.table(
        [_as_long_as(rows, values, column) for values, column in zip(columns, sample, strict=True)],
        names=sample.column_names,
    )


def _as_long_as(rows: int, values: Numbers, like: pa.ChunkedArray) -> pa.Array:
    """Pad values with nulls or NaN to a length; convert numbers of categories to categories."""
    if not pa.types.is_dictionary(like.type):
        return pa.array(np.pad(values, (0, rows - len(values)), constant_values=np.nan))
    codes = [*map(int, values), *[None] * (rows - len(values))]
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), like.chunk(0).dictionary)
