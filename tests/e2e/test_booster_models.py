"""Models of XGBoost's and LightGBM's to whose trees a run adds more."""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pytest
import xgboost
from tests.e2e.boosters import (
    BACKENDS,
    DRAWING,
    LOGISTIC,
    MODEL_FILES,
    ROUNDS,
    a_table,
    fit,
    model_of,
    same_everywhere,
)

import polytrain_xgboost
from polytrain import Result, RunConfig, TrainingFailedError
from polytrain_xgboost import XGBoost

both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return a_table().drop_columns(["kind"])


@pytest.mark.parametrize("num_workers", [0, 3])
def test_trees_are_added_to_a_model_as_xgboost_does(
    quiet: RunConfig, table: pa.Table, num_workers: int
) -> None:
    params = LOGISTIC["xgboost"]
    given = fit(quiet, table[:2000], 1, backend="xgboost", num_boost_round=3).load_model()
    backend = XGBoost(params=params, label="y", xgb_model=given)
    reference = polytrain_xgboost.bin_reference(table, backend)
    max_bin = reference.max_bin
    matrix = xgboost.QuantileDMatrix(
        table.drop_columns(["y"]),
        label=table.column("y").to_numpy(),
        ref=reference,
        max_bin=max_bin,
    )
    params = {**params, "max_bin": max_bin}
    alone = xgboost.train(params, matrix, num_boost_round=ROUNDS, xgb_model=given)
    result = fit(quiet, table, num_workers, backend="xgboost", xgb_model=given)
    assert model_of(result) == alone.save_raw()
    assert len(result.history) == ROUNDS


def test_trees_are_added_to_a_model_with_position_biases_as_xgboost_does(
    quiet: RunConfig, table: pa.Table
) -> None:
    """Learning these again from the first new round."""
    params = {"objective": "rank:ndcg", "lambdarank_unbiased": True, "max_depth": 3}
    query = np.arange(len(table)) // 30
    ranked = table.append_column("q", pa.array(query))
    options: dict[str, Any] = {"backend": "xgboost", "params": params, "qid": "q"}
    given = fit(quiet, ranked[:3000], 0, **options).load_model()
    reference = polytrain_xgboost.bin_reference(
        ranked, XGBoost(params=params, label="y", qid="q", xgb_model=given)
    )
    matrix = xgboost.QuantileDMatrix(
        table.drop_columns(["y"]),
        label=table.column("y").to_numpy(),
        qid=query,
        ref=reference,
        max_bin=reference.max_bin,
    )
    params = {**params, "max_bin": reference.max_bin}
    alone = xgboost.train(params, matrix, num_boost_round=ROUNDS, xgb_model=given)
    result = fit(quiet, ranked, 0, xgb_model=given, **options)
    assert model_of(result) == alone.save_raw()


def rows_of(*, high: float, constant: bool = False, seed: int = 0) -> pa.Table:
    """Numbers up to `high`, and categories; `x1` has one value only if it is constant."""
    generator = np.random.default_rng(seed)
    x0, x1 = generator.uniform(-high, high, size=(2, 600))
    if constant:
        x1[:] = 0.3
    kind = generator.integers(0, 2 if constant else 6, 600)
    label = 3 * np.sin(x0) + 2 * x1 + kind + generator.normal(size=600) / 10
    return pa.table({"x0": x0, "x1": x1, "kind": np.array(list("abcdef"))[kind], "y": label})


DART = {"booster": "dart", "rate_drop": 0.3}


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("way", ["xgb_model", "restore_from"])
@pytest.mark.parametrize(
    ("rows", "params"),
    [
        pytest.param({"high": 1}, {}, id="narrower"),
        pytest.param({"high": 9}, {}, id="wider"),
        pytest.param({"high": 3, "constant": True}, {}, id="constant"),
        pytest.param({"high": 3}, {"max_bin": 4}, id="max_bin"),
        pytest.param({"high": 2}, DART, id="dart"),
    ],
)
def test_xgboosts_metrics_are_those_of_the_whole_model_whatever_its_bins_were(
    quiet: RunConfig, way: str, rows: dict[str, Any], params: dict[str, Any], num_workers: int
) -> None:
    """The trees of the given model are from other rows, or from another number of bins."""
    kind = DART if params == DART else {}
    options: dict[str, Any] = {"backend": "xgboost", "params": {"max_depth": 4, **kind}}
    first = fit(quiet, rows_of(high=3), 0, **options)
    given = {way: first.load_model() if way == "xgb_model" else first.checkpoint}
    table, valid = rows_of(**rows, seed=1), rows_of(high=5, seed=2)
    options["params"] |= params
    rounds = 1 if params == DART else 3  # Later rounds scale the trees of earlier ones.
    done = 0 if way == "xgb_model" else ROUNDS
    result = fit(
        quiet,
        table,
        num_workers,
        datasets={"valid": valid},
        **{**options, **given, "num_boost_round": done + rounds},
    )
    for name, data in (("train", table), ("valid", valid)):
        for round_, metrics in enumerate(result.history[-rounds:], start=ROUNDS + 1):
            predicted = result.predict(data, iteration_range=(0, round_))
            error = np.sqrt(np.mean((predicted - data.column("y").to_numpy()) ** 2))
            assert metrics[f"{name}-rmse"] == pytest.approx(error, rel=1e-4)


MODEL_OPTION = {"xgboost": "xgb_model", "lightgbm": "init_model"}


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize("is_path", [False, True], ids=["object", "path"])
def test_trees_are_added_to_a_model(quiet: RunConfig, backend: str, is_path: bool) -> None:
    """The categories of its rows lie elsewhere in the alphabet than those of the rows to come."""
    table = a_table()
    kinds = table.column("kind").to_pylist()
    earlier = table.filter(pa.array([kind in "bdf" for kind in kinds]))
    later = table.filter(pa.array([kind in LATER_KINDS[backend] for kind in kinds]))
    first = fit(quiet, earlier, 2, backend=backend, num_boost_round=3)
    assert first.checkpoint is not None
    file = f"{first.checkpoint.path}/{MODEL_FILES[backend]}"
    options: dict[str, Any] = {
        "backend": backend,
        "params": DRAWING[backend],
        MODEL_OPTION[backend]: file if is_path else first.load_model(),
    }
    same_everywhere(quiet, later, **options)
    result = fit(quiet, later, 2, **options)
    assert len(result.history) == ROUNDS
    model, given = result.load_model(), first.load_model()
    if backend == "lightgbm":
        assert model.current_iteration() == 3 + ROUNDS
        kept = model.model_to_string(num_iteration=3).partition("parameters:")[0]
        assert trees_in(kept) == trees_in(given.model_to_string().partition("parameters:")[0])
    else:
        assert model.num_boosted_rounds() == 3 + ROUNDS
        assert model[:3].get_dump(with_stats=True) == given.get_dump(with_stats=True)


def test_lightgbms_model_is_continued_in_place_of_first_scores(
    quiet: RunConfig, table: pa.Table, caplog: pytest.LogCaptureFixture
) -> None:
    """And with all of its trees, even if it has stopped early."""
    table, params = table[:2000], {**LOGISTIC["lightgbm"], "metric": "auc"}
    given = fit(quiet, table[:500], 0, backend="lightgbm", params=params).load_model()
    given.best_iteration = 2
    options: dict[str, Any] = {"backend": "lightgbm", "params": params, "init_model": given}
    whole = fit(quiet, table, 0, **options)
    score = pa.array(np.arange(2000.0))
    for num_workers in (0, 2):
        caplog.clear()
        scored = fit(
            quiet, table.append_column("first", score), num_workers, init_score="first", **options
        )
        assert model_of(scored) == model_of(whole)
        assert num_workers or "in place of the initial scores in the column 'first'" in caplog.text
    given.best_iteration = 0
    assert model_of(fit(quiet, table, 0, **options)) == model_of(whole)


def trees_in(text: str) -> str:
    return text[text.index("Tree=0") :]


# XGBoost's model takes no new ones; LightGBM's has a number for each.
LATER_KINDS = {"xgboost": "df", "lightgbm": "acdf"}


@both
def test_early_stopping_counts_the_rounds_of_a_model_too(
    quiet: RunConfig, table: pa.Table, backend: str
) -> None:
    """The best round is one of the whole model's, which is what predictions are made with."""
    given = fit(quiet, table, 1, backend=backend, num_boost_round=3).load_model()
    noise = table.set_column(5, "y", pa.array(np.random.default_rng(5).integers(0, 2, len(table))))
    result = fit(
        quiet,
        table[:300],
        2,
        backend=backend,
        num_boost_round=60,
        datasets={"valid": noise},
        early_stopping_rounds=2,
        **{MODEL_OPTION[backend]: given},
    )
    losses = [metrics[f"valid-{LOSS[backend]}"] for metrics in result.history]
    assert len(losses) < 60
    best = 3 + int(np.argmin(losses))
    assert result.load_model().best_iteration == {"xgboost": best, "lightgbm": best + 1}[backend]


LOSS = {"xgboost": "logloss", "lightgbm": "binary_logloss"}


@pytest.fixture(scope="module")
def stopped_early(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """A run of each backend that has stopped early."""
    noise = table.set_column(5, "y", pa.array(np.random.default_rng(5).integers(0, 2, len(table))))
    results = {}
    for backend in BACKENDS:
        config = RunConfig(storage_path=tmp_path_factory.mktemp(backend), progress=False)
        results[backend] = fit(
            config,
            table[:300],
            0,
            backend=backend,
            num_boost_round=60,
            datasets={"valid": noise},
            early_stopping_rounds=2,
        )
        assert len(results[backend].history) < 20
    return results


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("way", ["object", "path", "restore_from"])
@both
def test_a_model_that_has_stopped_early_is_continued_and_predicts_with_all_trees(
    quiet: RunConfig, stopped_early: dict[str, Result], table: pa.Table, backend: str, way: str
) -> None:
    before = stopped_early[backend]
    assert before.checkpoint is not None
    done = len(before.history) if way == "restore_from" else 0
    given = {
        "object": {MODEL_OPTION[backend]: before.load_model()},
        "path": {MODEL_OPTION[backend]: f"{before.checkpoint.path}/{MODEL_FILES[backend]}"},
        "restore_from": {"restore_from": before.checkpoint},
    }[way]
    if way == "object" and backend == "xgboost":
        given["xgb_model"].set_attr(author="me")
    after = fit(quiet, table, 0, backend=backend, num_boost_round=done + 5, **given)
    assert len(after.history) == 5
    model = after.load_model()
    if backend == "xgboost":
        assert model.num_boosted_rounds() == len(before.history) + 5
        assert "best_iteration" not in model.attributes()
        assert model.attr("author") == ("me" if way == "object" else None)
    else:
        assert model.current_iteration() == len(before.history) + 5
        assert model.best_iteration < 1
    predicted = after.predict(table)
    label = table.column("y").to_numpy()
    loss = -np.log(np.where(label == 1, predicted, 1 - predicted)).mean()
    assert after.metrics[f"train-{LOSS[backend]}"] == pytest.approx(loss, rel=1e-5)


@both
def test_early_stopping_begins_where_an_earlier_run_had_none(
    quiet: RunConfig, table: pa.Table, backend: str
) -> None:
    """Nor a data set to evaluate on."""
    first = fit(quiet, table[:3000], 0, backend=backend, num_boost_round=6)
    more = fit(
        quiet,
        table[:3000],
        0,
        backend=backend,
        num_boost_round=9,
        datasets={"valid": table[3000:]},
        early_stopping_rounds=2,
        restore_from=first.checkpoint,
    )
    assert len(more.history) == 3


@pytest.mark.sweep(one_in=2)
@both
def test_a_run_that_had_rounds_left_to_wait_goes_on_with_more_rounds(
    quiet: RunConfig, table: pa.Table, backend: str
) -> None:
    """Its rounds were over, and not its patience."""
    options: dict[str, Any] = {
        "backend": backend,
        "datasets": {"valid": table[3000:]},
        "early_stopping_rounds": 3,
    }
    first = fit(quiet, table[:3000], 2, num_boost_round=4, **options)
    more = fit(quiet, table[:3000], 0, num_boost_round=7, restore_from=first.checkpoint, **options)
    assert len(more.history) == 3
    assert model_of(more) == model_of(fit(quiet, table[:3000], 0, num_boost_round=7, **options))


class XGBoostStandsStill(xgboost.callback.TrainingCallback):  # type: ignore[misc]  # it is Any here
    """Sets a rate in the first round, for all that follow."""

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if epoch == 0:
            model.set_param("learning_rate", 1e-6)
        return False


class LightGBMStandsStill:
    before_iteration = True

    def __call__(self, env: Any) -> None:
        if env.iteration == 0:
            env.model.reset_parameter({"eta": 1e-6})


@both
def test_what_a_callback_has_set_lasts_as_long_as_the_callback(
    quiet: RunConfig, table: pa.Table, backend: str
) -> None:
    """And not for a run with other callbacks, which has its own parameters."""
    stands = {"xgboost": XGBoostStandsStill(), "lightgbm": LightGBMStandsStill()}[backend]
    other = {
        "xgboost": xgboost.callback.EvaluationMonitor(),
        "lightgbm": lightgbm.record_evaluation({}),
    }[backend]
    first = fit(quiet, table, 0, backend=backend, num_boost_round=1, callbacks=[stands])

    def learnt(callbacks: list[Any]) -> float:
        more = fit(
            quiet, table, 0, backend=backend, callbacks=callbacks, restore_from=first.checkpoint
        )
        losses = [metrics[f"train-{LOSS[backend]}"] for metrics in (first.metrics, more.metrics)]
        return losses[0] - losses[1]

    assert learnt([stands]) < 1e-3
    assert learnt([other]) > 0.1


@both
def test_a_model_of_other_features(quiet: RunConfig, table: pa.Table, backend: str) -> None:
    given = fit(quiet, table, 1, backend=backend, num_boost_round=1).load_model()
    with pytest.raises(TrainingFailedError, match=r"has the features x0, x1.* are x1, x2"):
        fit(quiet, table.drop_columns(["x0"]), 2, backend=backend, **{MODEL_OPTION[backend]: given})


CLASSES = {
    "xgboost": {"objective": "multi:softprob", "num_class": 2},
    "lightgbm": {"objective": "multiclass", "num_class": 2},
}


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize("is_of_classes", [True, False])
def test_a_model_with_other_scores_for_each_row(
    quiet: RunConfig, table: pa.Table, backend: str, is_of_classes: bool
) -> None:
    """XGBoost itself would silently take one class's trees for another's."""
    first, then = {"params": CLASSES[backend]}, {}
    if not is_of_classes:
        first, then = then, first
    given = fit(quiet, table, 0, backend=backend, num_boost_round=2, **first).load_model()
    with pytest.raises(TrainingFailedError, match=r"gives \d score\(s\) for each row"):
        fit(quiet, table, 0, backend=backend, **{MODEL_OPTION[backend]: given}, **then)


def test_a_model_of_another_booster(quiet: RunConfig, table: pa.Table) -> None:
    """XGBoost itself would silently begin without its trees."""
    given = fit(quiet, table, 0, backend="xgboost", num_boost_round=1).load_model()
    with pytest.raises(TrainingFailedError, match=r"'gbtree'.* 'dart'"):
        fit(quiet, table, 0, backend="xgboost", xgb_model=given, params={"booster": "dart"})


def test_a_category_that_xgboosts_model_has_never_seen(quiet: RunConfig) -> None:
    table = a_table()
    known = table.filter(pa.array([kind != "d" for kind in table.column("kind").to_pylist()]))
    given = fit(quiet, known, 1, backend="xgboost", num_boost_round=1).load_model()
    with pytest.raises(TrainingFailedError, match="doesn't know 'd' in the column 'kind'"):
        fit(quiet, table, 2, backend="xgboost", xgb_model=given)
