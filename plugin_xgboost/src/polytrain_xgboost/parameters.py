"""Checks of XGBoost's parameters, without importing XGBoost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from polytrain.boosting.problems import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE_SHARE,
    SHARE,
    Parameters,
    Range,
    is_at_least,
    listed,
    needed_by_objective,
    parameter_problem,
)
from polytrain_plugins import (
    Job,
    Problem,
    is_instance_of,
    needed_without_function,
    unknown_name,
)
from polytrain_xgboost.known_parameters import KNOWN_PARAMETERS

# Parameters that the run sets: names, meaning and remedy.
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
"""LightGBM's parameter → XGBoost's equivalent."""

_ALIASES = {
    "learning_rate": "eta",
    "min_split_loss": "gamma",
    "n_jobs": "nthread",
    "random_state": "seed",
    "reg_alpha": "alpha",
    "reg_lambda": "lambda",
}
"""Another name of a parameter → its own."""

_OBJECTIVES = (
    *("binary:hinge", "binary:logistic", "binary:logitraw", "count:poisson"),
    *("multi:softmax", "multi:softprob", "rank:map", "rank:ndcg", "rank:pairwise"),
    *("reg:absoluteerror", "reg:gamma", "reg:linear", "reg:logistic"),
    *("reg:pseudohubererror", "reg:quantileerror", "reg:squarederror", "reg:squaredlogerror"),
    *("reg:tweedie", "survival:aft", "survival:cox"),
)

QUANTILES = ("reg:absoluteerror", "reg:quantileerror")
"""Objectives whose leaves are quantiles of residuals."""

_METRICS = (
    *("aft-nloglik", "ams", "auc", "aucpr", "cox-nloglik", "error"),
    *("gamma-deviance", "gamma-nloglik", "interval-regression-accuracy", "logloss", "mae", "map"),
    *("mape", "merror", "mlogloss", "mphe", "ndcg", "poisson-nloglik", "pre", "quantile"),
    *("rmse", "rmsle", "tweedie-nloglik"),
)
"""Names of metrics. Users may append "@" and a parameter, and "-", as in "ndcg@8-"."""

_OF_ONE_WORKER = frozenset({"ams", "cox-nloglik"})
"""Metrics that XGBoost refuses to evaluate of rows on several workers."""

_WHOLE = (
    *("max_depth", "max_leaves", "max_bin", "max_cat_to_onehot", "max_cat_threshold"),
    *("num_parallel_tree", "nthread", "n_jobs", "seed", "random_state", "verbosity"),
    "max_cached_hist_node",
)

_REAL = (
    *("eta", "learning_rate", "gamma", "min_split_loss", "min_child_weight", "max_delta_step"),
    *("colsample_bytree", "colsample_bylevel", "colsample_bynode", "lambda", "reg_lambda"),
    *("alpha", "reg_alpha", "scale_pos_weight", "rate_drop", "skip_drop"),
    *("tweedie_variance_power", "huber_slope"),
)

RANGES = {
    **dict.fromkeys(
        (
            *("alpha", "eta", "gamma", "lambda", "learning_rate", "max_delta_step", "max_depth"),
            *("max_leaves", "min_child_weight", "min_split_loss", "num_class", "reg_alpha"),
            *("reg_lambda", "scale_pos_weight"),
        ),
        NOT_NEGATIVE,
    ),
    # XGBoost takes 0 as well, and then uses no rows or features.
    **dict.fromkeys(
        ("colsample_bylevel", "colsample_bynode", "colsample_bytree", "subsample"), POSITIVE_SHARE
    ),
    **dict.fromkeys(("quantile_alpha", "rate_drop", "skip_drop", "sparse_threshold"), SHARE),
    **dict.fromkeys(
        (
            *("lambdarank_num_pair_per_sample", "max_cached_hist_node", "max_cat_threshold"),
            *("max_cat_to_onehot", "num_parallel_tree"),
        ),
        COUNT,
    ),
    "max_bin": Range(least=2),
    "tweedie_variance_power": Range(least=1, below=2),
    "verbosity": Range(least=0, most=3),
}
"""Parameter → the numbers that XGBoost takes, but for those with which it trains nothing.

It checks them when it trains the first tree.
"""

SWITCHES = (
    *("disable_default_eval_metric", "lambdarank_normalization", "lambdarank_unbiased"),
    *("lambdarank_score_normalization", "ndcg_exp_gain", "one_drop", "refresh_leaf"),
)

WORDS = {
    "aft_loss_distribution": ("normal", "logistic", "extreme"),
    "booster": ("gbtree", "dart"),
    "grow_policy": ("depthwise", "lossguide"),
    "lambdarank_pair_method": ("topk", "mean"),
    "multi_strategy": ("one_output_per_tree", "multi_output_tree"),
    "normalize_type": ("tree", "forest"),
    "process_type": ("default",),
    "sample_type": ("uniform", "weighted"),
    "sampling_method": ("uniform",),
    "tree_method": ("auto", "hist"),
}
"""Parameter → the words that it may be here, as XGBoost reads them: upper case is an error."""

_LOGISTIC = ("binary:logistic", "binary:logitraw", "reg:logistic")

PARAMETERS = Parameters(
    framework="XGBoost",
    known=KNOWN_PARAMETERS,
    of_the_run=_OURS,
    other_framework="LightGBM",
    translated=_LIGHTGBMS,
    whole=_WHOLE,
    real=_REAL,
    ranges=RANGES,
    threads=("nthread", "n_jobs"),
    switches=SWITCHES,
    switch_texts=("true", "false", "1", "0"),
)

_REFUSED_WORDS = {
    "tree_method": {
        "approx": "every worker makes different bins in every round",
        "exact": "it needs all rows on one worker",
        "gpu_hist": "XGBoost removed it; ScalingConfig(use_gpu=True) trains on GPUs",
    },
    "booster": {"gblinear": "it has no trees and uses no bins"},
    "process_type": {"update": "it changes a model's trees, and a run adds trees"},
    "sampling_method": {
        "gradient_based": "rows are drawn by their numbers, the same at any number of workers"
    },
}

_UPDATERS = {
    **dict.fromkeys(("refresh", "prune", "sync"), "it makes no trees"),
    "grow_colmaker": _REFUSED_WORDS["tree_method"]["exact"],
    "grow_histmaker": _REFUSED_WORDS["tree_method"]["approx"],
}

_MULTI_OUTPUT_TREE = "multi_output_tree"
"""The `multi_strategy` with which one tree has a value for each class or quantile."""

_ALL_ROWS = "it compares all rows with each other, and every worker has only a part of them"


def own_name(name: str) -> str:
    """Return the own name of a parameter, which may be given by another."""
    return _ALIASES.get(name, name)


def parameter_problems(params: Mapping[str, Any], job: Job) -> Iterator[Problem]:
    """Yield the parameters to change, to replace by an option, or to leave out."""
    yield from PARAMETERS.problems(params, job)
    for name, option in {"objective": "obj", "eval_metric": "custom_metric"}.items():
        if callable(params.get(name)):
            yield parameter_problem(
                name, "it is a function, and XGBoost takes a name here", f"Use the option {option}"
            )
            params = {each: params[each] for each in params if each != name}
    for name in (name for name in WORDS if name in params):
        word = str(params[name])
        if reason := _REFUSED_WORDS.get(name, {}).get(word):
            yield parameter_problem(name, f"{word!r} can't be used: {reason}", "Leave it out")
        else:
            yield from unknown_name(
                f"params[{name!r}]", word, WORDS[name], f"the words for {name!r}"
            )
    for updater in str(params.get("updater", "")).split(","):
        if reason := _UPDATERS.get(updater.strip()):
            yield parameter_problem(
                "updater", f"{updater.strip()!r} can't be used: {reason}", "Leave it out"
            )
    objective = str(params.get("objective", "reg:squarederror"))
    yield from unknown_name("params['objective']", objective, _OBJECTIVES, "XGBoost's objectives")
    if objective == "survival:cox" and job.num_workers > 1:
        yield parameter_problem(
            "objective", f"{objective!r} can't be used: {_ALL_ROWS}", "Use one worker"
        )
    if objective in QUANTILES and job.num_workers > 1:
        strategy = str(params.get("multi_strategy"))
        if strategy == _MULTI_OUTPUT_TREE:
            yield parameter_problem(
                "multi_strategy",
                f"{strategy!r} with {objective!r} gives NaN on several workers",
                "Leave it out, or use one worker",
            )
    if objective.startswith("multi:") and not is_at_least(params.get("num_class"), 1):
        yield needed_by_objective(objective, "params['num_class']", "Give the number of classes")
    if objective == "reg:quantileerror" and "quantile_alpha" not in params:
        yield needed_by_objective(
            objective, "params['quantile_alpha']", "Give the quantile, such as 0.9"
        )
    for name in _metrics(params):
        yield from unknown_name("params['eval_metric']", name, _METRICS, "XGBoost's metrics")
    if objective in _LOGISTIC:
        yield from SHARE.problems("base_score", params.get("base_score"))
    yield from _device_problems(params, job)


def train_metric_problems(params: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem if XGBoost can't evaluate a metric of rows on several workers."""
    if not callable(params.get("eval_metric")) and (found := _OF_ONE_WORKER & {*_metrics(params)}):
        yield parameter_problem(
            "eval_metric",
            f"XGBoost can't evaluate {listed(sorted(found))} of rows on several workers",
            "Use eval_train=False, another metric, or one worker",
        )


def _metrics(params: Mapping[str, Any]) -> list[str]:
    """Return the metrics' names, without their parameters."""
    given = params.get("eval_metric", ())
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    metrics = given if is_list else [given]
    return [str(metric).partition("@")[0].removesuffix("-") for metric in metrics]


def is_true(params: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return whether a parameter is set, as XGBoost reads it from text."""
    return str(params.get(name, default)).lower() in ("true", "1")


def number_of_outputs(params: Mapping[str, Any]) -> int:
    """Return how many scores the objective gives each row: one for each class or quantile."""
    if is_at_least(params.get("num_class"), 1):
        return int(params["num_class"])
    if params.get("objective") != "reg:quantileerror":
        return 1
    alphas = params.get("quantile_alpha")
    if isinstance(alphas, str):
        # XGBoost reads all parameters from text.
        return len(alphas.split(","))
    return len(alphas) if isinstance(alphas, Sized) else 1


def class_problems(params: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem if there are several classes, and XGBoost's objective takes none."""
    objective = params.get("objective", "reg:squarederror")
    if callable(objective) or str(objective).startswith("multi:"):
        return
    if is_at_least(params.get("num_class"), 2):
        yield parameter_problem(
            "num_class",
            f"XGBoost has no classes with the objective {objective!r}",
            "Leave it out; for classes, use the objective 'multi:softprob'",
        )


def tree_problems(params: Mapping[str, Any], categories: Sequence[str]) -> Iterator[Problem]:
    """Yield the reasons why XGBoost can't grow trees with a value for each output."""
    if number_of_outputs(params) < 2 or params.get("multi_strategy") != _MULTI_OUTPUT_TREE:
        return
    if categories:
        yield parameter_problem(
            "multi_strategy",
            f"XGBoost's {_MULTI_OUTPUT_TREE!r} takes numbers alone, and these features are "
            f"categories: {listed(categories)}",
            "Leave it out, or turn the categories into numbers",
        )
    if params.get("booster") == "dart":
        yield parameter_problem(
            "multi_strategy",
            f"XGBoost has no {_MULTI_OUTPUT_TREE!r} with booster='dart'",
            "Leave one of them out",
        )


def bound_problems(options: Any) -> Iterator[Problem]:
    """Yield the problems of the label columns: "survival:aft" takes two bounds, all others a label.

    Args:
        options: the backend.
    """
    # If `params` isn't a mapping, another check reports it.
    params = options.params if isinstance(options.params, Mapping) else {}
    if str(params.get("objective")) != "survival:aft":
        yield from needed_without_function(options, label="Name the column to predict")
        for option in ("label_lower_bound", "label_upper_bound"):
            if getattr(options, option) is not None:
                yield Problem(
                    field=option,
                    what="only the objective 'survival:aft' has bounds of labels",
                    remedy="Leave it out, or use params={'objective': 'survival:aft'}",
                )
        return
    yield from needed_without_function(
        options,
        label_lower_bound="Name the column with the lower bound of each row's label",
        label_upper_bound="Name the column with the upper bound, which may be infinite",
    )
    if options.label is not None:
        yield Problem(
            field="label",
            what="the objective 'survival:aft' takes two bounds instead",
            remedy="Leave label out. A label that is known has twice the same bound",
        )


def query_problems(params: Mapping[str, Any], qid: str | None) -> Iterator[Problem]:
    """Yield a problem if the objective needs queries and `qid` isn't set.

    XGBoost would treat all rows of a worker as one query.
    """
    objective = str(params.get("objective"))
    if objective.startswith("rank:") and qid is None:
        yield needed_by_objective(objective, "qid", "Name the column with each row's query")


def device_for(params: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Return the parameter `device` for a worker with this number of GPUs."""
    return {"device": "cuda"} if gpus and "device" not in params else {}


def _device_problems(params: Mapping[str, Any], job: Job) -> Iterator[Problem]:
    """Yield a problem if the device contradicts `use_gpu`."""
    device = str(params.get("device", ""))
    if device.startswith(("cuda", "gpu")) and not job.use_gpu:
        yield parameter_problem(
            "device", f"{device!r} needs a GPU in every worker", "Add ScalingConfig(use_gpu=True)"
        )
    if device == "cpu" and job.use_gpu:
        yield parameter_problem(
            "device",
            "'cpu' leaves each worker's GPU unused",
            "Leave it out, or use ScalingConfig(use_gpu=False)",
        )


def function_problems(**functions: Any) -> Iterator[Problem]:
    """Yield a problem for each option that isn't a function that XGBoost can call."""
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
                what="xgboost.objective is experimental and not supported",
                remedy="Pass a function of scores and matrix",
            )


def callback_problems(callbacks: Sequence[Any]) -> Iterator[Problem]:
    """Yield the problems of the option `callbacks`, without importing XGBoost."""
    for callback in callbacks:
        if not is_instance_of(callback, "xgboost", "TrainingCallback"):
            yield Problem(
                field="callbacks",
                what=f"{callback!r} isn't a callback of XGBoost",
                remedy="Derive its class from xgboost.callback.TrainingCallback",
            )
        elif is_instance_of(callback, "xgboost", "EarlyStopping"):
            yield Problem(
                field="callbacks",
                what="EarlyStopping loses its state when a run restarts",
                remedy="Use the option early_stopping_rounds",
            )


def feature_weight_problems(weights: Any, features: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of the option `feature_weights`."""
    is_list = isinstance(weights, list | tuple)
    if not is_list or not all(isinstance(each, int | float) and each > 0 for each in weights):
        yield Problem(
            field="feature_weights",
            what=f"{weights!r} isn't a list of numbers above 0",
            remedy="Give one for each feature, in their order",
        )
    elif features and len(weights) != len(features):
        yield Problem(
            field="feature_weights",
            what=f"it has {len(weights)} numbers, and there are {len(features)} features",
            remedy="Give one for each feature, in their order",
        )
