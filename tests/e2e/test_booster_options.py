"""What users bring along for XGBoost and LightGBM: objectives, metrics, callbacks.

A model is the same at any number of workers with these too, and after a run has gone on elsewhere.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
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
    MANY_ROUNDS,
    ROUNDS,
    a_table,
    fit,
    model_of,
    same_everywhere,
    trained,
)

import polytrain_xgboost
from polytrain import (
    FailureKind,
    Result,
    RunConfig,
    TrainingFailedError,
    get_context,
)
from polytrain_xgboost import XGBoost

both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return a_table().drop_columns(["kind"])


def logistic(scores: Any, train: Any) -> tuple[Any, Any]:
    """An objective, as either of them takes it."""
    chance = 1 / (1 + np.exp(-scores))
    return chance - train.get_label(), chance * (1 - chance)


class StopsAfter(xgboost.callback.TrainingCallback):  # type: ignore[misc]  # it is Any here
    """Ends training after a round, on one of the ranks."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        return bool(xgboost.collective.get_rank() == 0 and epoch == self._epoch)

    def after_training(self, model: Any) -> Any:
        model.set_attr(ended="yes")
        return model


class SlowsDown(xgboost.callback.TrainingCallback):  # type: ignore[misc]
    """Learns the slower, the better the metric of all rounds has become."""

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        seen = evals_log["valid"]["logloss"]
        assert len(seen) == epoch + 1
        model.set_param("learning_rate", float(sum(seen) / len(seen)))
        return False


def a_falling_rate(round_: int) -> float:
    return 0.3 * 0.9**round_


class DrawsLess(xgboost.callback.TrainingCallback):  # type: ignore[misc]
    """Draws fewer rows and columns in later rounds."""

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        model.set_param({"colsample_bynode": 0.9**epoch, "subsample": 0.7 * 0.99**epoch})
        return False


class GrowsSmallerTrees:
    """From the third round on, and says so once."""

    before_iteration = True

    def __call__(self, env: Any) -> None:
        if env.iteration == 2:
            env.model.reset_parameter({"num_leaf": 6})


def rates(backend: str) -> list[Any]:
    if backend == "xgboost":
        return [xgboost.callback.LearningRateScheduler(a_falling_rate), DrawsLess()]
    fewer = {"feature_fraction_bynode": lambda round_: 0.9**round_}
    fewer["bagging_fraction"] = lambda round_: 0.7 * 0.99**round_
    falls = lightgbm.reset_parameter(learning_rate=a_falling_rate, **fewer)
    return [falls, GrowsSmallerTrees()]


def with_objective(backend: str, **params: Any) -> dict[str, Any]:
    """Options for the objective above."""
    if backend == "xgboost":
        return {"params": {"max_depth": 4, **params}, "obj": logistic}
    return {"params": {"num_leaves": 12, "objective": logistic, **params}}


CASES: dict[str, Callable[[str], dict[str, Any]]] = {
    "objective": with_objective,
    "objective and draws": lambda backend: with_objective(
        backend,
        **{name: value for name, value in DRAWING[backend].items() if name != "objective"},
    ),
    "rates": lambda backend: {
        "params": {
            name: value
            for name, value in DRAWING[backend].items()
            if not name.startswith(("colsample", "feature"))
        },
        "callbacks": rates(backend),
    },
}


@pytest.mark.only_in_sweep
def test_dart_with_an_objective_is_the_same_everywhere(quiet: RunConfig, table: pa.Table) -> None:
    options = with_objective("xgboost", booster="dart", rate_drop=0.4)
    same_everywhere(quiet, table, backend="xgboost", **options)


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_same_everywhere(
    quiet: RunConfig, table: pa.Table, backend: str, case: str
) -> None:
    same_everywhere(quiet, table, backend=backend, **CASES[case](backend))


@pytest.mark.sweep(one_in=2)
@both
def test_the_first_scores_of_rows_survive_a_restart(
    quiet: RunConfig, table: pa.Table, backend: str
) -> None:
    option = {"xgboost": "base_margin", "lightgbm": "init_score"}[backend]
    first = np.random.default_rng(3).normal(size=len(table)) * 3
    table = table.append_column("first", pa.array(first))
    options: dict[str, Any] = {"backend": backend, option: "first"}
    same_everywhere(quiet, table, **options)
    options["datasets"] = {"valid": table[:500]}
    whole = fit(quiet, table, 0, **options)
    begun = fit(quiet, table, 0, num_boost_round=4, **options)
    assert begun.checkpoint is not None
    rest = fit(quiet, table, 0, restore_from=begun.checkpoint, **options)
    assert [*begun.history, *rest.history] == whole.history


def test_a_callback_gets_the_metrics_of_all_rounds(quiet: RunConfig, table: pa.Table) -> None:
    """And what it makes of them is the same in every worker, after a restart too."""
    options: dict[str, Any] = {"callbacks": [SlowsDown()], "datasets": {"valid": table[:500]}}
    ours = same_everywhere(quiet, table, backend="xgboost", **options)
    plain = trained(quiet, table, 1, backend="xgboost", num_boost_round=MANY_ROUNDS)
    assert ours != plain


class Notes:
    """A callback that somebody has written for LightGBM: it keeps what it sees, in a file."""

    order = 30

    def __init__(self, path: Path, records: dict[str, Any]) -> None:
        self._path = path
        self._records = records

    def __call__(self, env: lightgbm.callback.CallbackEnv) -> None:
        """Keep one round, as a line."""
        results = [
            (data, metric, value, maximize, result.metric_std_dev, result.is_cv_result())
            for result in env.evaluation_result_list
            for data, metric, value, maximize in [result]
        ]
        with self._path.open("a") as file:
            file.write(json.dumps([env.iteration, results]) + "\n")
        self._path.with_suffix(".records").write_text(json.dumps(self._records))


def test_lightgbms_callbacks_see_what_they_see_in_lightgbm(
    quiet: RunConfig, table: pa.Table, tmp_path: Path
) -> None:
    """Its own and a stranger's, also where a run begins with the rounds of another."""

    def callbacks(path: Path) -> list[Any]:
        records: dict[str, Any] = {}
        own = [lightgbm.log_evaluation(5), lightgbm.record_evaluation(records)]
        return [*own, Notes(path, records)]

    features, label = table.select(["x0", "x1", "x2"]).to_pandas(), table.column("y").to_numpy()
    params = {"objective": "binary", "metric": ["auc", "binary_logloss"], "verbose": -1}
    train = lightgbm.Dataset(features, label)
    lightgbm.train(
        params,
        train,
        MANY_ROUNDS,
        valid_sets=[lightgbm.Dataset(features[:500], label[:500], reference=train)],
        valid_names=["valid"],
        callbacks=callbacks(tmp_path / "theirs"),
    )
    rows = table.select(["x0", "x1", "x2", "y"])

    def ours_for(rounds: int, **options: Any) -> Result:
        return fit(
            quiet,
            rows,
            2,
            backend="lightgbm",
            params=params,
            num_boost_round=rounds,
            eval_train=False,
            datasets={"valid": rows[:500]},
            callbacks=callbacks(tmp_path / "ours"),
            **options,
        )

    first = ours_for(4)
    history = first.history + ours_for(MANY_ROUNDS, restore_from=first.checkpoint).history
    theirs, ours = (read_notes(tmp_path / name) for name in ("theirs", "ours"))
    assert ours.keys() == theirs.keys() == set(range(MANY_ROUNDS))
    for round_, expected in theirs.items():
        for mine, its in zip(ours[round_], expected, strict=True):
            assert mine[:2] + mine[3:] == its[:2] + its[3:]
            assert mine[2] == history[round_][f"valid-{mine[1]}"]
    [of_valid] = json.loads((tmp_path / "ours.records").read_text()).values()
    assert of_valid.keys() == {"auc", "binary_logloss"}
    assert of_valid["auc"][-1] == ours[MANY_ROUNDS - 1][0][2]


def read_notes(path: Path) -> dict[int, Any]:
    """Round to what was seen of it; each rank has kept it, and some rounds were made twice."""
    return dict(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("params", [{}, {"objective": "binary:logistic"}])
def test_an_objective_ends_in_the_model_of_xgboost_alone(
    quiet: RunConfig, table: pa.Table, num_workers: int, params: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"params": {"max_depth": 4, **params}, "obj": logistic}
    ours = trained(quiet, table, num_workers, backend="xgboost", **options)
    reference = polytrain_xgboost.bin_reference(table, XGBoost(label="y", **options))
    matrix = xgboost.QuantileDMatrix(
        table.drop_columns(["y"]), label=table.column("y").to_numpy(), ref=reference
    )
    alone = xgboost.train(options["params"], matrix, num_boost_round=ROUNDS, obj=logistic)
    assert ours == alone.save_raw()


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_metric_is_that_of_all_rows(
    quiet: RunConfig, table: pa.Table, backend: str, num_workers: int
) -> None:
    """Beside the same one of the framework's, which counts weights."""
    table = table.append_column("w", pa.array(np.arange(len(table)) % 3 + 1.0))
    known = {"xgboost": {"eval_metric": "error"}, "lightgbm": {"metric": "binary_error"}}[backend]
    [name] = known.values()
    result = fit(
        quiet,
        table,
        num_workers,
        backend=backend,
        datasets={"valid": table[:501]},
        params={**LOGISTIC[backend], **known},
        weight="w",
        **{"xgboost": {"custom_metric": share_wrong}, "lightgbm": {"feval": share_wrong_of}}[
            backend
        ],
    )
    for metrics in result.history:
        assert set(metrics) == {f"{data}-{m}" for data in ("train", "valid") for m in ("own", name)}
        for data in ("train", "valid"):
            assert metrics[f"{data}-own"] == pytest.approx(metrics[f"{data}-{name}"])


def share_wrong(chances: Any, data: Any) -> list[tuple[str, float]]:
    wrong = (chances > 0.5) != data.get_label()
    return [("own", float(np.average(wrong, weights=data.get_weight())))]


def share_wrong_of(chances: Any, data: Any) -> tuple[str, float, bool]:
    [(name, share)] = share_wrong(chances, data)
    return name, share, False


@both
def test_early_stopping_looks_at_a_metric_of_ones_own(
    quiet: RunConfig, table: pa.Table, backend: str
) -> None:
    """It is best in the second round, and more is better."""

    def third_is_worse(scores: Any, data: Any) -> Any:
        calls.append(1)
        return ("own", float(len(calls) == 2), *([True] if backend == "lightgbm" else []))

    calls: list[int] = []
    own = {
        "xgboost": {"custom_metric": third_is_worse, "maximize": True},
        "lightgbm": {"feval": third_is_worse, "params": {"metric": "none"}},
    }[backend]
    result = fit(
        quiet,
        table,
        2,
        backend=backend,
        datasets={"valid": table[:500]},
        eval_train=False,
        early_stopping_rounds=3,
        **own,
    )
    assert len(result.history) == 5
    best = result.load_model().best_iteration
    assert best == {"xgboost": 1, "lightgbm": 2}[backend]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_callback_stops_all_ranks(quiet: RunConfig, table: pa.Table, num_workers: int) -> None:
    """For good: who goes on with the run's checkpoint has a model that is finished."""
    options: dict[str, Any] = {"backend": "xgboost", "callbacks": [StopsAfter(3)]}
    result = fit(quiet, table, num_workers, **options)
    assert len(result.history) == 4
    model = result.load_model()
    assert model.num_boosted_rounds() == 4
    assert model.attr("ended") == "yes"
    assert trained(quiet, table, 1, restore_from=result.checkpoint, **options) == model_of(result)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_callback_of_lightgbms_stops_all_ranks(
    quiet: RunConfig, table: pa.Table, num_workers: int
) -> None:
    def stops(env: Any) -> None:
        if env.iteration == 3 and get_context().get_world_rank() == 0:
            raise lightgbm.callback.EarlyStopException(1, env.evaluation_result_list)

    result = fit(quiet, table, num_workers, backend="lightgbm", callbacks=[stops])
    assert len(result.history) == 4
    assert result.load_model().best_iteration == 2


class Raises:
    """At the third call by a thread: one worker of LightGBM's trains on two."""

    def __init__(self, returned: Any = None) -> None:
        self._calls: dict[int, int] = {}
        self._returned = returned

    def __call__(self, *_: Any) -> Any:
        thread = threading.get_ident()
        self._calls[thread] = self._calls.get(thread, 0) + 1
        if self._calls[thread] == 3:
            raise ValueError("no third round")
        return self._returned


class RaisingCallback(xgboost.callback.TrainingCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self._raises = Raises()

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self._raises()
        return False


def raising(backend: str, what: str) -> dict[str, Any]:
    def objective(scores: Any, train: Any) -> Any:
        fails()
        return logistic(scores, train)

    fails = Raises()
    if backend == "xgboost":
        return {
            "objective": {"obj": objective},
            "metric": {"custom_metric": Raises(("own", 1.0))},
            "callback": {"callbacks": [RaisingCallback()]},
        }[what]
    return {
        "objective": {"params": {"objective": objective}},
        "metric": {"feval": Raises(("own", 1.0, False))},
        "callback": {"callbacks": [fails]},
    }[what]


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(
    ("backend", "num_workers"),
    # One worker of LightGBM's trains on two threads, one of XGBoost's as one of several does.
    [("xgboost", 0), ("xgboost", 3), ("lightgbm", 0), ("lightgbm", 1), ("lightgbm", 3)],
)
@pytest.mark.parametrize("what", ["objective", "metric", "callback"])
def test_what_a_user_raises_ends_the_run(
    quiet: RunConfig, table: pa.Table, backend: str, what: str, num_workers: int
) -> None:
    """On rank 0 alone or on all of them: it is told, with where it comes from."""
    options = {"eval_train": False, "datasets": {"valid": table[:500]}, **raising(backend, what)}
    with pytest.raises(TrainingFailedError) as caught:
        fit(quiet, table, num_workers, backend=backend, **options)
    failure = caught.value.failures[0]
    assert failure.kind is FailureKind.USER_ERROR
    assert "ValueError: no third round" in failure.message
    assert "in __call__" in failure.traceback
    assert caught.value.result is not None
    rounds = len(caught.value.result.history)
    # Another rank may raise in the third round before rank 0 has reported the second.
    assert rounds == 2 or (rounds == 1 and num_workers > 1 and failure.rank != 0)


def test_a_random_forest_is_the_same_everywhere(quiet: RunConfig, table: pa.Table) -> None:
    """LightGBM adds no trees to one: a restart begins with the first."""
    params = {**LOGISTIC["lightgbm"], "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.6}
    same_everywhere(quiet, table, backend="lightgbm", params=params)
