"""Bins for the trees of a model: on these they decide as on values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xgboost

from polytrain.boosting.columns import Numbers
from polytrain.boosting.sampling import sample_of
from polytrain_xgboost import XGBoost, bin_reference
from polytrain_xgboost.collective import Ranks
from polytrain_xgboost.cuts import Splits, cuts_of, ends_of, joined_ends, splits_of, table_for
from polytrain_xgboost.matrices import training_data

SPLITS = np.array([-7, -2.5, -1, 0.3, 0.30001, 0.7, 1, 4, 80], np.float32)

VALUES: dict[str, tuple[Numbers, Numbers]] = {
    # The sample that bins are made from, and all rows.
    "all rows": (np.linspace(-3, 3, 50), np.linspace(-3, 3, 50)),
    "wider than the sample": (np.linspace(-3, 3, 50), np.linspace(-90, 90, 500)),
    "positive": (np.linspace(0.5, 3, 50), np.linspace(0.25, 3, 50)),
    "negative": (np.linspace(-3, -0.5, 50), np.linspace(-3, -0.25, 50)),
    "one value": (np.full(5, 0.5), np.full(5, 0.5)),
    "one negative value": (np.full(5, -0.5), np.full(5, -0.5)),
    "none in the sample": (np.full(5, np.nan), np.linspace(-3, 3, 50)),
    "none": (np.full(5, np.nan), np.full(5, np.nan)),
}


@pytest.mark.parametrize("case", VALUES)
def test_thresholds_decide_on_bins_as_on_values(case: str) -> None:
    sample, rows = VALUES[case]
    edges = edges_for(sample, rows, SPLITS)
    # XGBoost takes the lower edge of a value's bin; values above all bins are in the last.
    bins = np.minimum(np.searchsorted(edges, np.float32(rows), side="right"), len(edges) - 1)
    for split in SPLITS:
        here = ~np.isnan(rows)
        assert ((edges[np.maximum(bins - 1, 0)] < split) == (np.float32(rows) < split))[here].all()


@pytest.mark.parametrize("case", VALUES)
def test_trees_from_these_bins_change_them_no_more(case: str) -> None:
    sample, rows = VALUES[case]
    edges = edges_for(sample, rows, SPLITS)
    again = edges_for(sample, rows, np.unique(np.concatenate([SPLITS, edges])))
    assert again.tolist() == edges.tolist()


def test_a_models_own_bins_stay() -> None:
    sample, rows = VALUES["wider than the sample"]
    table, matrix = binned(sample)
    [cuts] = cuts_of(matrix, table)
    assert not cuts.lacks_some_of(cuts.edges)
    # The highest value gets an edge of its own, so that XGBoost's last edge is the same.
    assert edges_for(sample, rows, cuts.edges).tolist() == sorted([*cuts.edges.tolist(), 3.0])


@pytest.mark.parametrize("bin_sample_rows", [10, 200_000])
def test_bins_are_for_all_categories_and_those_of_the_sample(bin_sample_rows: int) -> None:
    """A category has one row, which a sample of ten lacks. XGBoost would take it for another."""
    sample = sample_of(1000, bin_sample_rows, seed=0)
    x = np.random.default_rng(0).normal(size=1000)
    kinds = np.array(list("ab"))[np.arange(1000) % 2]
    kinds[(set(range(1000)) - {*sample[:10]}).pop()] = "c"
    table = pa.table({"x": x, "kind": kinds, "w": x**2, "y": x})
    options = XGBoost(label="y", weight="w", bin_sample_rows=bin_sample_rows)
    starts, edges = bin_reference(table, options).get_quantile_cut()
    assert edges[starts[1] :].tolist() == [0, 1, 2]
    rows = x[sample]
    alone = xgboost.QuantileDMatrix(rows.reshape(-1, 1), weight=rows**2)
    assert edges[: starts[1]].tolist() == alone.get_quantile_cut()[1].tolist()


def test_categories_of_an_evaluation_set_change_no_bins() -> None:
    """XGBoost splits a column by one category or by several, depending on how many it has."""
    tables = {
        "train": pa.table({"kind": ["a", "b", "a"], "y": [1.0, 2.0, 3.0]}),
        "few": pa.table({"kind": ["b"], "y": [1.0]}),
        "more": pa.table({"kind": ["c"], "y": [1.0]}),
    }
    data = training_data(
        tables,
        options=XGBoost(label="y"),
        params={"nthread": 1},
        ranks=Ranks(),
        outside=lambda call, *given: call(*given),
        model=None,
        directory=None,
    )
    assert data.train.get_quantile_cut()[1].tolist() == [0, 1]
    found = {name: each.get_data().data.tolist() for name, each in data.evaluated.items()}
    assert found == {"few": [1], "more": [2]}


@pytest.mark.parametrize("booster", ["gbtree", "dart"])
def test_splits_are_the_thresholds_of_all_trees(booster: str) -> None:
    kinds = np.array(list("abc"))[np.arange(300) % 3]
    x = np.linspace(0, 1, 300)
    table = pa.table({"x": x, "kind": pa.array(kinds).dictionary_encode()})
    matrix = xgboost.QuantileDMatrix(table, label=x + (kinds == "b"), enable_categorical=True)
    model = xgboost.train({"booster": booster, "max_depth": 3}, matrix, num_boost_round=3)
    nodes = model.trees_to_dataframe()
    thresholds = nodes[nodes.Feature == "x"].Split.astype(np.float32)
    splits: Splits = splits_of(model)
    assert splits[0].tolist() == sorted(set(thresholds.tolist()))
    assert [*splits] == [0], "bins have all categories in any case"


def test_ends_are_those_of_all_ranks() -> None:
    assert joined_ends([[(0, 1), None], [(-2, 0), None]]) == [(-2, 1), None]


def binned(sample: Numbers) -> tuple[pa.Table, xgboost.QuantileDMatrix]:
    table = pa.table({"x": sample})
    return table, xgboost.QuantileDMatrix(table, max_bin=8)


def edges_for(sample: Numbers, rows: Numbers, splits: Numbers) -> Numbers:
    """The edges of XGBoost's bins, its lower bound of the first one before them."""
    table, matrix = binned(sample)
    ends = [ends_of(pa.chunked_array([rows]))]
    values = table_for(cuts_of(matrix, table), {0: splits}, ends, table)
    again = xgboost.QuantileDMatrix(values, max_bin=max(8, len(values)))
    edges: Numbers = again.get_quantile_cut()[1]
    return edges
