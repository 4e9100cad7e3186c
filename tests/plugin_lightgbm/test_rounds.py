"""The draws of a round, of which callbacks change some parameters."""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pytest

from polytrain.boosting.sampling import RowNumbers
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.datasets import Agreement, Rows
from polytrain_lightgbm.rounds import RowDraws, check_draws

ROWS = 1000


def begun(**params: Any) -> tuple[LightGBM, lightgbm.Booster]:
    """Return a run's options, and the booster that it begins with."""
    options = LightGBM(label="y", params=params)
    return options, lightgbm.Booster(options.booster_params(1), some_rows())


def some_rows() -> lightgbm.Dataset:
    x = np.arange(100.0)
    return lightgbm.Dataset(x.reshape(-1, 1), x % 2, params={"verbosity": -1})


def draws_of(options: LightGBM) -> RowDraws | None:
    table = pa.table({"y": np.arange(ROWS) % 2})
    agreement = Agreement(
        categories={},
        reference=some_rows(),
        numbers=RowNumbers(first_row=0, first_query=0, total_rows=ROWS),
        rows={"train": Rows(table=table, options=options)},
    )
    return RowDraws.of(options, agreement)


@pytest.mark.parametrize(
    ("params", "shares"),
    [
        ({"pos_bagging_fraction": 0.3}, None),
        ({"pos_bagging_fraction": 0.3, "bagging_fraction": 0.8}, [0.8, 0.8]),
        ({"pos_bagging_fraction": 0.3, "objective": "binary"}, [1.0, 0.3]),
        ({"data_sample_strategy": "Bagging", "bagging_fraction": 0.8}, [0.8, 0.8]),
        ({"data_sample_strategy": "GOSS"}, None),
    ],
    ids=str,
)
def test_rows_are_drawn_by_the_fractions_that_lightgbm_uses(
    params: dict[str, Any], shares: list[float] | None
) -> None:
    """Those of labels belong to "binary" alone."""
    options, booster = begun(bagging_freq=1, **params)
    draws = draws_of(options)
    found = None
    if draws is not None:
        mask = draws.mask(booster, 3)
        found = [mask[::2].mean(), mask[1::2].mean()]
    assert found == (None if shares is None else pytest.approx(shares, abs=0.05))


@pytest.mark.parametrize("name", ["bagging_fraction", "subsample"])
def test_a_callback_may_change_the_share_of_drawn_rows(name: str) -> None:
    options, booster = begun(bagging_fraction=0.8, bagging_freq=1)
    draws = draws_of(options)
    assert draws is not None
    assert draws.mask(booster, 3).mean() == pytest.approx(0.8, abs=0.05)
    for rate in (0.3, 1.0):
        booster.reset_parameter({name: rate})
        check_draws(booster, options)
        assert draws.mask(booster, 3).mean() == pytest.approx(rate, abs=0.05)


def test_a_round_reads_the_weights_of_its_rows_and_metrics_those_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = {"objective": "lambdarank", "bagging_fraction": 0.5, "bagging_freq": 1}
    options = LightGBM(label="y", group="q", params=params)
    relevance = np.random.default_rng(0).integers(0, 4, ROWS)
    rows = Rows(
        table=pa.table({"y": relevance, "q": np.arange(ROWS) // 20, "w": np.ones(ROWS)}),
        options=options,
    )

    def data(**given: Any) -> lightgbm.Dataset:
        x = np.random.default_rng(1).normal(size=(ROWS, 1))
        quiet = {"verbosity": -1}
        return lightgbm.Dataset(x, relevance, group=rows.query_sizes, params=quiet, **given)

    train = data().construct()
    draws = RowDraws(
        options=options,
        agreement=Agreement(
            categories={},
            reference=train,
            numbers=RowNumbers(first_row=0, first_query=0, total_rows=ROWS),
            rows={"train": rows},
        ),
    )
    draws.prepare(train)
    booster = lightgbm.Booster(options.booster_params(1), train)
    booster.add_valid(data(reference=train), "all")
    # LightGBM would compute the weights of queries anew, where its metrics don't look.
    monkeypatch.setattr(train, "set_field", lambda *_: pytest.fail("a booster reads the fields"))
    draws.update(booster, train, 0, None)
    assert [each[2] for each in booster.eval_train()] == [each[2] for each in booster.eval_valid()]
    weights = draws.mask(booster, 0).astype(float)
    alone = lightgbm.Booster(booster.params, data(weight=weights))
    alone.update()
    assert booster.model_to_string() == alone.model_to_string()


@pytest.mark.parametrize(
    ("params", "changed"),
    [
        ({"bagging_freq": 1}, {"bagging_fraction": 0.5}),
        ({"bagging_freq": 1, "objective": "binary"}, {"neg_bagging_fraction": 0.5}),
        ({}, {"subsample": 0.5, "subsample_freq": 1}),
        ({"bagging_fraction": 0.5, "bagging_freq": 2}, {"subsample_freq": 1}),
    ],
)
def test_a_callback_can_not_begin_draws(params: dict[str, Any], changed: dict[str, Any]) -> None:
    """LightGBM would draw rows by their numbers on the worker."""
    options, booster = begun(**params)
    check_draws(booster, options)
    booster.reset_parameter(changed)
    with pytest.raises(ValueError, match="bagging_freq"):
        check_draws(booster, options)


@pytest.mark.parametrize(
    ("params", "changed"),
    [
        ({}, {"bagging_fraction": 0.5}),
        ({"bagging_freq": 1}, {"bagging_fraction": 1.0}),
        ({"bagging_freq": 1}, {"neg_bagging_fraction": 0.5}),
        ({"boosting": "rf", "bagging_freq": 1, "subsample": 0.5}, {"bagging_fraction": 0.4}),
    ],
)
def test_other_changes_are_allowed(params: dict[str, Any], changed: dict[str, Any]) -> None:
    options, booster = begun(**params)
    booster.reset_parameter(changed)
    check_draws(booster, options)
