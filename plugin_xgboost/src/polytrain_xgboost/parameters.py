"""What is wrong with parameters of XGBoost's, as far as it can be told without XGBoost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polytrain_plugins import (
    Job,
    Problem,
    is_instance_of,
    misspelt_parameters,
    needed_by_objective,
    not_numbers,
    refused_parameters,
    too_many_threads,
    unknown_name,
)
from polytrain_xgboost.known_parameters import KNOWN_PARAMETERS

# The run's own: parameters, why, and what to do instead.
_OURS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("num_boost_round", "num_round", "n_estimators"),
        "the number of rounds, restarts included",
        "Use the option num_boost_round",
    ),
    (
        ("early_stopping_rounds",),
        "a rule that all workers must follow in the same round",
        "Use the option early_stopping_rounds",
    ),
)

_LIGHTGBMS = {
    "bagging_fraction": "subsample",
    "boosting": "booster",
    "feature_fraction": "colsample_bytree",
    "feature_fraction_bynode": "colsample_bynode",
    "lambda_l1": "alpha",
    "lambda_l2": "lambda",
    "metric": "eval_metric",
    "min_data_in_leaf": "min_child_weight",
    "min_gain_to_split": "gamma",
    "num_leaves": "max_leaves",
    "num_threads": "nthread",
}
"""LightGBM's parameters, and what does about the same."""

_OBJECTIVES = (
    *("binary:hinge", "binary:logistic", "binary:logitraw", "count:poisson"),
    *("multi:softmax", "multi:softprob", "rank:map", "rank:ndcg", "rank:pairwise"),
    *("reg:absoluteerror", "reg:expectileerror", "reg:gamma", "reg:linear", "reg:logistic"),
    *("reg:pseudohubererror", "reg:quantileerror", "reg:squarederror", "reg:squaredlogerror"),
    *("reg:tweedie", "survival:aft", "survival:cox"),
)

_METRICS = (
    *("aft-nloglik", "ams", "auc", "aucpr", "cox-nloglik", "error", "expectile"),
    *("gamma-deviance", "gamma-nloglik", "interval-regression-accuracy", "logloss", "mae", "map"),
    *("mape", "merror", "mlogloss", "mphe", "ndcg", "poisson-nloglik", "pre", "quantile"),
    *("rmse", "rmsle", "tweedie-nloglik"),
)
"""Some with a parameter behind an "@", and a "-" at the end."""

_WHOLE = (
    *("max_depth", "max_leaves", "max_bin", "max_cat_to_onehot", "max_cat_threshold"),
    *("num_parallel_tree", "nthread", "n_jobs", "seed", "random_state", "verbosity"),
)

_REAL = (
    *("eta", "learning_rate", "gamma", "min_split_loss", "min_child_weight", "max_delta_step"),
    *("colsample_bytree", "colsample_bylevel", "colsample_bynode", "lambda", "reg_lambda"),
    *("alpha", "reg_alpha", "scale_pos_weight", "rate_drop", "skip_drop"),
    *("tweedie_variance_power", "huber_slope"),
)

_WITHOUT_BINS = {
    "tree_method": {
        "approx": "it makes new bins in every round, on every worker others",
        "exact": "it needs all rows on one worker",
        "gpu_hist": "XGBoost has it no more; with ScalingConfig(use_gpu=True), GPUs are used",
    },
    "booster": {"gblinear": "it has no trees, and takes no bins"},
}

_BOUNDS = "it needs two bounds for each row, which XGBoost isn't given here"
_ALL_ROWS = "it compares each row with all others, and every worker has a part of them"


def parameter_problems(params: Mapping[str, Any], job: Job) -> Iterator[Problem]:
    """What has to be another parameter, another option, or left out."""
    yield from refused_parameters(params, _OURS)
    others = (*_LIGHTGBMS, *(name for names, _, _ in _OURS for name in names))
    yield from misspelt_parameters(params, (*KNOWN_PARAMETERS, *others), "XGBoost's parameters")
    for name, ours in _LIGHTGBMS.items():
        if name in params:
            yield _problem(name, "it is a parameter of LightGBM's", f"XGBoost's is {ours!r}")
    for name, refused in _WITHOUT_BINS.items():
        if params.get(name) in refused:
            value = params[name]
            yield _problem(name, f"{value!r} can't be used: {refused[value]}", "Leave it out")
    objective = str(params.get("objective", "reg:squarederror"))
    yield from unknown_name("params['objective']", objective, _OBJECTIVES, "XGBoost's objectives")
    if objective == "survival:aft":
        yield _problem("objective", f"{objective!r} can't be used: {_BOUNDS}", "Use another one")
    if objective == "survival:cox" and job.num_workers > 1:
        yield _problem("objective", f"{objective!r} can't be used: {_ALL_ROWS}", "Use one worker")
    if objective.startswith("multi:") and not _is_count(params.get("num_class")):
        yield needed_by_objective(objective, "params['num_class']", "Give the number of classes")
    metrics = params.get("eval_metric", ())
    for metric in [metrics] if isinstance(metrics, str) else metrics:
        name = str(metric).partition("@")[0].removesuffix("-")
        yield from unknown_name("params['eval_metric']", name, _METRICS, "XGBoost's metrics")
    yield from not_numbers(params, whole=_WHOLE, real=_REAL)
    depth = params.get("max_depth", 0)
    if isinstance(depth, int) and depth < 0:
        yield _problem("max_depth", f"{depth} is below 0", "Give 0 for no limit, or more")
    rate = params.get("subsample", 1)
    if not isinstance(rate, int | float) or not 0 < rate <= 1:
        yield _problem("subsample", f"{rate!r} is no part of the rows", "Give more than 0, up to 1")
    yield from too_many_threads(params, ("nthread", "n_jobs"), job)
    yield from _device_problems(params, job)


def query_problems(params: Mapping[str, Any], qid: str | None) -> Iterator[Problem]:
    """The option `qid`, where the objective has to know of queries: XGBoost would take all rows of
    a worker for one."""
    objective = str(params.get("objective"))
    if objective.startswith("rank:") and qid is None:
        yield needed_by_objective(objective, "qid", "Name the column that tells the query of a row")


def _is_count(value: Any) -> bool:
    try:
        return int(value) > 0
    except (TypeError, ValueError):
        return False


def _problem(name: str, what: str, remedy: str) -> Problem:
    return Problem(field=f"params[{name!r}]", what=what, remedy=remedy)


def device_for(params: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """The parameter that says what to train on, for a worker with so many GPUs."""
    return {"device": "cuda"} if gpus and "device" not in params else {}


def _device_problems(params: Mapping[str, Any], job: Job) -> Iterator[Problem]:
    """A device that contradicts `use_gpu`."""
    device = str(params.get("device", ""))
    if device.startswith(("cuda", "gpu")) and not job.use_gpu:
        yield _problem(
            "device", f"{device!r} needs a GPU in every worker", "Add ScalingConfig(use_gpu=True)"
        )
    if device == "cpu" and job.use_gpu:
        yield _problem(
            "device",
            "'cpu' leaves the GPU unused that every worker is given",
            "Leave it out, or use ScalingConfig(use_gpu=False)",
        )


def function_problems(**functions: Any) -> Iterator[Problem]:
    """Options that aren't a function with two arguments, as XGBoost calls it."""
    for option, function in functions.items():
        if function is None:
            continue
        if not callable(function):
            yield Problem(
                field=option,
                what=f"{function!r} is not a function",
                remedy="Name XGBoost's own in params, as 'objective' or 'eval_metric'",
            )
        elif is_instance_of(function, "xgboost", "Objective"):
            yield Problem(
                field=option,
                what="xgboost.objective is experimental, and no part of this",
                remedy="Pass a function of scores and matrix",
            )


def callback_problems(callbacks: Any) -> Iterator[Problem]:
    """What is wrong with the option `callbacks`, without importing XGBoost for it."""
    if not isinstance(callbacks, Sequence):
        yield Problem(
            field="callbacks", what=f"{callbacks!r} is not a list", remedy="Pass callbacks=[…]"
        )
        return
    for callback in callbacks:
        if not is_instance_of(callback, "xgboost", "TrainingCallback"):
            yield Problem(
                field="callbacks",
                what=f"{callback!r} is no callback of XGBoost's",
                remedy="Derive its class from xgboost.callback.TrainingCallback",
            )
        elif is_instance_of(callback, "xgboost", "EarlyStopping"):
            yield Problem(
                field="callbacks",
                what="EarlyStopping forgets what it has seen when a run is restarted",
                remedy="Use the option early_stopping_rounds",
            )
