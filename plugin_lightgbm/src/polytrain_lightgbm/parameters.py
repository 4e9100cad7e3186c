"""LightGBM's parameters: names, checks, and the parameters that the run sets.

This module doesn't import LightGBM, since the driver uses it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from polytrain.boosting.problems import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    Parameters,
    Range,
    parameter_problem,
)
from polytrain_lightgbm.known_parameters import ALIASES, COMMAND_LINE, REAL, SWITCHES, WHOLE
from polytrain_plugins import Job, Problem, unknown_name


def parameter_names(name: str) -> tuple[str, ...]:
    """Return a parameter's own name and its aliases."""
    return (name, *ALIASES.get(name, ()))


def own_name(name: str) -> str:
    """Return the own name of a parameter, which may be given by an alias."""
    return next((own for own, aliases in ALIASES.items() if name in aliases), name)


OF_PREDICTIONS = (
    *("pred_early_stop", "pred_early_stop_freq", "pred_early_stop_margin"),
    *("predict_disable_shape_check", *parameter_names("num_threads")),
    *parameter_names("verbosity"),
)
"""The parameters that predictions accept."""


def _all_names(names: Iterable[str]) -> list[str]:
    return [each for name in names for each in parameter_names(name)]


ROW_DRAWS = (
    *("bagging_fraction", "bagging_freq", "bagging_seed"),
    *("pos_bagging_fraction", "neg_bagging_fraction"),
)
"""The parameters that decide which rows a round uses."""

# Parameters that the run sets, with LightGBM's aliases: names, meaning and remedy.
_OURS: tuple[tuple[list[str], str, str], ...] = (
    (
        _all_names(["num_machines"]),
        "the number of workers",
        "Leave it out; ScalingConfig(num_workers=…) sets it",
    ),
    (
        _all_names(["machines", "local_listen_port", "machine_list_filename"]),
        "an address of the workers, known only once they run",
        "Leave it out",
    ),
    (
        _all_names(["pre_partition"]),
        "how the rows are split, which is decided for the run as a whole",
        "Leave it out",
    ),
    (
        _all_names(["early_stopping_round"]),
        "a rule that all workers must follow in the same round",
        "Use the option early_stopping_rounds",
    ),
    (
        _all_names(["num_iterations"]),
        "the number of rounds, restarts included",
        "Use the option num_boost_round",
    ),
    (
        _all_names(["categorical_feature"]),
        "a list of columns, whose categories all workers must agree on",
        "Use the option categorical",
    ),
)

_REFUSED_LEARNERS = {
    "serial": "each worker would train a model of its own on its part of the rows",
    "feature": "it needs all rows on every worker, and LightGBM's library refuses it here",
    "voting": "LightGBM then ends in different models on different workers",
}

_NOT_IN_PARALLEL = {
    "interaction_constraints": (
        "LightGBM's learner for several machines fails with it (std::bad_alloc)"
    ),
    "forcedsplits_filename": "LightGBM's learner for several machines takes no forced splits",
    "lambdarank_position_bias_regularization": (
        "it is for the positions of rows, which no option names: each machine would learn biases "
        "from its own rows"
    ),
}
"""Parameter that LightGBM's data-parallel learner ignores, refuses or crashes with → the reason."""

_XGBOOSTS = {
    "base_score": "boost_from_average",
    "booster": "boosting",
    "eval_metric": "metric",
    "gamma": "min_gain_to_split",
}
"""XGBoost's parameter → LightGBM's equivalent; XGBoost's other names are aliases in LightGBM."""

RANGES = {
    **dict.fromkeys(
        (
            *("alpha", "fair_c", "learning_rate", "poisson_max_delta_step", "scale_pos_weight"),
            "sigmoid",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        (
            *("cat_l2", "cat_smooth", "cegb_penalty_split", "cegb_tradeoff", "lambda_l1"),
            "early_stopping_min_delta",
            *("lambda_l2", "linear_lambda", "min_data_in_leaf", "min_gain_to_split"),
            *("min_sum_hessian_in_leaf", "monotone_penalty", "path_smooth"),
        ),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        (
            *("bagging_fraction", "feature_fraction", "feature_fraction_bynode"),
            *("neg_bagging_fraction", "pos_bagging_fraction"),
        ),
        POSITIVE_SHARE,
    ),
    **dict.fromkeys(
        ("drop_rate", "other_rate", "refit_decay_rate", "skip_drop", "top_rate"), SHARE
    ),
    **dict.fromkeys(
        (
            *("bin_construct_sample_cnt", "lambdarank_truncation_level", "max_cat_threshold"),
            *("max_cat_to_onehot", "metric_freq", "min_data_in_bin", "min_data_per_group"),
            *("multi_error_top_k", "num_class", "time_out", "top_k"),
        ),
        COUNT,
    ),
    "max_bin": Range(least=2),
    "num_leaves": Range(least=2, most=131_072),
    "tweedie_variance_power": Range(least=1, below=2),
}
"""Parameter → the numbers that LightGBM takes; it checks them when a booster is made."""


PARAMETERS_OF_FEATURES = (
    *_all_names(("monotone_constraints", "feature_contri", "max_bin_by_feature")),
    *("forcedbins_filename", "cegb_penalty_feature_lazy", "cegb_penalty_feature_coupled"),
)
"""Names of the parameters that refer to features by number, or have a value for each feature."""


PARAMETERS = Parameters(
    framework="LightGBM",
    known=_all_names(ALIASES),
    of_the_run=_OURS,
    other_framework="XGBoost",
    translated=_XGBOOSTS,
    whole=_all_names(WHOLE),
    real=_all_names(REAL),
    switches=_all_names(SWITCHES),
    switch_texts=("true", "false", "+", "-"),
    ranges={name: its for own, its in RANGES.items() for name in parameter_names(own)},
    threads=parameter_names("num_threads"),
)

_GPUS = (
    "LightGBM's published packages have no CUDA, and what they do by OpenCL isn't the same model "
    "at any number of workers"
)


def gpu_problems(job: Job) -> Iterator[Problem]:
    """Yield a problem if workers have GPUs."""
    if job.use_gpu:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what=f"LightGBM can't use GPUs here: {_GPUS}",
            remedy="Leave it out, or use XGBoost. With a LightGBM of your own that has CUDA: a "
            "training function, and resources_per_worker={'GPU': 1}",
        )


def parameter_problems(params: Mapping[str, Any], job: Job) -> Iterator[Problem]:
    """Yield the parameters to change, to replace by an option, or to leave out."""
    yield from PARAMETERS.problems(params, job)
    for parameter, (what, remedy) in COMMAND_LINE.items():
        for name in (name for name in parameter_names(parameter) if name in params):
            yield parameter_problem(
                name, f"it is {what}, and training from Python ignores it", remedy
            )
    for name in (name for name in parameter_names("tree_learner") if name in params):
        learner = str(params[name]).removesuffix("_parallel")
        yield from unknown_name(
            f"params[{name!r}]", learner, ("data", *_REFUSED_LEARNERS), "LightGBM's learners"
        )
        if learner in _REFUSED_LEARNERS and job.num_workers > 1:
            yield parameter_problem(
                name,
                f"{learner!r} can't be used by {job.num_workers} workers: "
                f"{_REFUSED_LEARNERS[learner]}",
                "Leave it out to get 'data', or use num_workers=1",
            )
    yield from _boosting_problems(params)
    reason = _WITHOUT_FUNCTIONS.get(boosting_of(params))
    if reason is not None and callable(value(params, "objective")):
        yield parameter_problem(
            "boosting",
            f"{boosting_of(params)!r} with a function as objective {reason}",
            "Use 'gbdt', or one of LightGBM's own objectives",
        )
    for name in parameter_names("monotone_constraints"):
        if isinstance(params.get(name), Mapping):
            yield parameter_problem(
                name,
                "it is a dict, which LightGBM doesn't take",
                "Give a list with -1, 0 or 1 for each feature, in their order",
            )
    bins = params.get("forcedbins_filename")
    is_file = isinstance(bins, str | os.PathLike) and os.path.isfile(bins)
    if sets_something(bins) and not is_file:
        yield parameter_problem(
            "forcedbins_filename",
            f"there is no file {bins!r}, which LightGBM would ignore",
            "Give the path of a file that every node has",
        )
    for name in (name for name in parameter_names("linear_tree") if is_true(params, name)):
        yield parameter_problem(
            name, "LightGBM grows linear trees from the rows of one worker alone", "Leave it out"
        )
    for parameter, reason in _NOT_IN_PARALLEL.items():
        for name in (
            name for name in parameter_names(parameter) if sets_something(params.get(name))
        ):
            yield parameter_problem(
                name, reason, "Leave it out; or use XGBoost, or a training function"
            )
    for name in (name for name in parameter_names("device_type") if name in params):
        if str(params[name]).lower() != "cpu":
            yield parameter_problem(
                name,
                f"{params[name]!r} can't be used: {_GPUS}",
                "Leave it out; or use XGBoost, or a training function",
            )


_WITHOUT_FUNCTIONS = {
    "dart": "drops other trees in every run: LightGBM reads memory there that it hasn't set",
    "rf": "can't be used: LightGBM's random forests take no objective of yours",
}
"""Boosting → what LightGBM does if the objective is a function."""

_BOOSTINGS = ("gbdt", "gbrt", "rf", "random_forest", "dart", "goss")
_STRATEGIES = ("bagging", "goss")


def _boosting_problems(params: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield boostings that LightGBM lacks, and draws of rows that don't fit the boosting."""
    name = next((each for each in parameter_names("boosting") if each in params), "boosting")
    # LightGBM takes them in any case.
    boosting = str(params.get(name, "gbdt")).lower()
    strategy = strategy_of(params)
    yield from unknown_name(f"params[{name!r}]", boosting, _BOOSTINGS, "LightGBM's boostings")
    yield from unknown_name(
        "params['data_sample_strategy']", strategy, _STRATEGIES, "LightGBM's strategies"
    )
    try:
        bags = (
            int(value(params, "bagging_freq", 0)) > 0
            and float(value(params, "bagging_fraction", 1)) < 1
        )
        draws_features = float(value(params, "feature_fraction", 1)) < 1
        rates = {"top_rate": 0.2, "other_rate": 0.1}
        rates = {name: float(params.get(name, usual)) for name, usual in rates.items()}
    except (TypeError, ValueError):
        # Another check reports what isn't a number.
        return
    if "goss" in (boosting, strategy):
        if bags:
            yield parameter_problem(
                "bagging_freq", "GOSS draws rows itself", "Leave out bagging_freq and its fraction"
            )
        for rate, share in rates.items():
            if share == 0:
                yield parameter_problem(rate, "GOSS needs some of these rows", "Give more than 0")
        if sum(rates.values()) > 1:
            yield parameter_problem(
                "other_rate",
                f"together with top_rate it must be at most 1; got {sum(rates.values()):g}",
                "Give smaller rates",
            )
    elif boosting in ("rf", "random_forest") and not bags and not draws_features:
        yield parameter_problem(
            name,
            f"{boosting!r} makes its trees differ by draws, and none is set",
            "Add 'bagging_freq': 1 and 'bagging_fraction': 0.8, or 'feature_fraction': 0.8",
        )


def value(params: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return a parameter's value, given under any of its names in LightGBM."""
    return next((params[each] for each in parameter_names(name) if each in params), default)


def boosting_of(params: Mapping[str, Any]) -> str:
    """Return the boosting's main name. LightGBM takes its names in any case."""
    boosting = str(value(params, "boosting", "gbdt")).lower()
    return {"gbrt": "gbdt", "random_forest": "rf"}.get(boosting, boosting)


def strategy_of(params: Mapping[str, Any]) -> str:
    """Return how LightGBM draws rows, in lower case: it takes any."""
    return str(params.get("data_sample_strategy", "bagging")).lower()


def sets_something(given: Any) -> bool:
    """Return whether a parameter's value isn't empty. It may be an array."""
    return len(given) > 0 if isinstance(given, Sized) else bool(given)


def is_true(params: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return whether a parameter is set, as LightGBM reads it from text."""
    return str(value(params, name, default)).lower() in ("true", "+")


def without(params: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the parameters without these, whichever aliases they have."""
    left_out = {*_all_names(names)}
    return {name: value for name, value in params.items() if name not in left_out}


def parallel_params(world_size: int) -> dict[str, Any]:
    """Return the parameters for data-parallel training; none if the world size is 1."""
    if world_size == 1:
        return {}
    return {"tree_learner": "data", "num_machines": world_size, "pre_partition": True}


def reported_by_one_machine(text: str, changes: Mapping[str, Any]) -> str:
    """Return the parameters' part of a model's text, as if one process had trained the model.

    Args:
        text: this part of the text, written by a machine of a network.
        changes: parameters that the run has changed, with the user's values.
    """
    alone = {"num_machines": 1, "tree_learner": "serial", "pre_partition": 0}
    for name, its_value in {**alone, **changes}.items():
        text = re.sub(rf"(?m)^\[{name}: .*\]$", f"[{name}: {_as_given(its_value)}]", text)
    return text


def _as_given(its_value: Any) -> str:
    if isinstance(its_value, str):
        return its_value
    return f"{float(its_value):g}" if isinstance(its_value, float) else str(int(its_value))
