"""XGBoost's driver half: what is wrong with its options, and what its workers need."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xgboost
from tests.ranges import values_at_the_ends

from polytrain_plugins import DatasetInfo, Device, Job, Problem
from polytrain_xgboost import XGBoost
from polytrain_xgboost.known_parameters import KNOWN_PARAMETERS
from polytrain_xgboost.parameters import RANGES, SWITCHES, WORDS, device_for

TRAIN = DatasetInfo(name="train", columns=("x", "w", "y"), num_rows=100)
VALID = replace(TRAIN, name="valid")
JOB = Job(
    num_workers=4,
    use_gpu=False,
    cpus_per_worker=1,
    has_training_function=False,
    datasets={"train": TRAIN, "valid": VALID},
)
WITH_FUNCTION = replace(JOB, has_training_function=True)


def problems(job: Job = JOB, **options: Any) -> dict[str, Problem]:
    return {problem.field: problem for problem in XGBoost(**options).problems(job)}


def test_usual_options_have_no_problem() -> None:
    params = {"objective": "binary:logistic", "max_depth": 3}
    assert problems(params=params, label="y", weight="w", early_stopping_rounds=2) == {}


@pytest.mark.parametrize("rounds", [0, -1, 2.5, "ten"])
def test_rounds_are_a_whole_number(rounds: Any) -> None:
    assert repr(rounds) in problems(label="y", num_boost_round=rounds)["num_boost_round"].what


def test_early_stopping_needs_a_data_set_to_look_at() -> None:
    alone = replace(JOB, datasets={"train": TRAIN})
    found = problems(alone, label="y", early_stopping_rounds=3)
    assert "valid" in found["early_stopping_rounds"].remedy


def test_columns_are_looked_for_in_every_data_set() -> None:
    lacking = replace(JOB, datasets={"train": TRAIN, "valid": replace(VALID, columns=("x", "y"))})
    [problem] = XGBoost(label="y", weight="w").problems(lacking)
    assert problem.field == "weight"
    assert "'valid' has no column 'w'" in problem.what
    assert "x, y" in problem.remedy


def test_a_data_set_that_is_not_known_yet_lacks_no_column() -> None:
    """What is wrong with it has been told already."""
    unknown = replace(JOB, datasets={"train": DatasetInfo(name="train")})
    assert problems(unknown, label="y") == {}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("params", {"max_depth": 3}),
        ("num_boost_round", 5),
        ("label", "y"),
        ("weight", "w"),
        ("early_stopping_rounds", 2),
    ],
)
def test_with_a_function_the_options_stay_unset(option: str, value: Any) -> None:
    assert list(problems(WITH_FUNCTION, **{option: value})) == [option]


def test_with_a_function_no_option_is_required() -> None:
    assert problems(replace(WITH_FUNCTION, datasets={})) == {}


def test_a_rank_that_evaluates_has_all_rows() -> None:
    assert XGBoost(label="y").demand(JOB).whole_datasets == {"valid"}
    assert XGBoost().demand(WITH_FUNCTION).whole_datasets == frozenset()


def test_it_travels() -> None:
    options = XGBoost(params={"max_depth": 3}, label="y")
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("params", "remedy"),
    [
        ({"n_estimators": 5}, "num_boost_round"),
        ({"early_stopping_rounds": 5}, "the option early_stopping_rounds"),
        ({"num_leaves": 31}, "'max_leaves'"),
        ({"bagging_fraction": 0.5}, "'subsample'"),
        ({"tree_method": "approx"}, "Leave it out"),
        ({"tree_method": "exact"}, "Leave it out"),
        ({"booster": "gblinear"}, "Leave it out"),
        ({"process_type": "update"}, "Leave it out"),
        ({"updater": "refresh"}, "Leave it out"),
        ({"updater": "grow_quantile_histmaker,prune"}, "Leave it out"),
        ({"updater": "grow_colmaker"}, "Leave it out"),
        ({"objective": "reg:expectileerror"}, "There are"),
        ({"sampling_method": "gradient_based"}, "Leave it out"),
        ({"objective": "binary"}, "binary:logistic"),
        ({"objective": "survival:cox"}, "Use one worker"),
        ({"objective": print}, "the option obj"),
        ({"eval_metric": print}, "the option custom_metric"),
        ({"eval_metric": ["rmse", "ams@0.2"]}, "eval_train=False"),
        ({"max_depth": -3}, "at least 0"),
        ({"max_bin": 1}, "at least 2"),
        ({"colsample_bytree": 1.5}, "above 0 and at most 1"),
        ({"reg_lambda": -1}, "at least 0"),
        ({"quantile_alpha": [0.5, 2]}, "at most 1"),
        ({"base_score": 1.5, "objective": "binary:logistic"}, "at most 1"),
        ({"max_depth": "three"}, "Give a whole number"),
        ({"max_depth": 3.0}, "Give a whole number"),
        ({"eta": "fast"}, "Give a number"),
        ({"subsample": 1.5}, "at most 1"),
        ({"subsample": 0}, "at most 1"),
        ({"nthread": 2}, "resources_per_worker"),
        ({"tree_method": "gpu_hist"}, "Leave it out"),
        ({"device": "cuda"}, "ScalingConfig(use_gpu=True)"),
        ({"device": "gpu:0"}, "ScalingConfig(use_gpu=True)"),
    ],
)
def test_parameters_that_mean_something_else_here(params: dict[str, Any], remedy: str) -> None:
    [(field, problem)] = problems(label="y", params=params).items()
    [name, *_] = params
    assert field == f"params[{name!r}]"
    assert remedy in problem.remedy


def test_quantiles_are_named() -> None:
    params: dict[str, Any] = {"objective": "reg:quantileerror"}
    assert list(problems(label="y", params=params)) == ["params['quantile_alpha']"]
    assert problems(label="y", params={**params, "quantile_alpha": [0.1, 0.9]}) == {}


def test_a_parameter_that_is_none_is_not_given() -> None:
    assert problems(label="y", params=dict.fromkeys(KNOWN_PARAMETERS)) == {}
    options = XGBoost(params=dict.fromkeys(KNOWN_PARAMETERS))
    assert (options.seed, options.row_rate) == (0, 1.0)


def test_usual_parameters_have_no_problem() -> None:
    usual = {
        "objective": "reg:tweedie",
        "tree_method": "hist",
        "booster": "dart",
        "subsample": 1,
        "nthread": 1,
        "max_depth": "4",
        "eta": 1,
        "max_leaves": None,
    }
    assert problems(label="y", params=usual) == {}


@pytest.mark.parametrize(
    ("categorical", "what"),
    [("x", "'x' is one name"), (["z"], "has no column 'z'"), (["y"], "'y' isn't a feature")],
)
def test_categories_are_in_features(categorical: Any, what: str) -> None:
    assert what in problems(label="y", categorical=categorical)["categorical"].what


@pytest.mark.parametrize("rows", [0, -5, 1.5, True])
def test_bins_need_rows(rows: Any) -> None:
    found = problems(label="y", bin_sample_rows=rows)
    assert repr(rows) in found["bin_sample_rows"].what


def test_workers_with_gpus_train_on_them() -> None:
    on_gpus = replace(JOB, use_gpu=True)
    assert Device.GPU in XGBoost.capabilities.devices
    assert problems(on_gpus, label="y") == {}
    assert problems(on_gpus, label="y", params={"device": "cuda:0"}) == {}
    assert device_for({}, gpus=1) == {"device": "cuda"}
    assert device_for({"device": "cuda:0"}, gpus=1) == {}
    assert device_for({}, gpus=0) == {}


def test_workers_with_gpus_do_not_train_beside_them() -> None:
    [problem] = problems(replace(JOB, use_gpu=True), label="y", params={"device": "cpu"}).values()
    assert "unused" in problem.what
    assert "use_gpu=False" in problem.remedy
    assert problems(label="y", params={"device": "cpu"}) == {}


def test_a_build_without_cuda_is_not_left_to_train_on_cpus(monkeypatch: Any) -> None:
    import xgboost

    from polytrain_xgboost.engine import check_build

    monkeypatch.setattr(xgboost, "build_info", lambda: {"USE_CUDA": False})
    check_build({"device": "cpu"})
    with pytest.raises(RuntimeError, match="without CUDA"):
        check_build({"device": "cuda"})


def objective(scores: Any, train: Any) -> Any:
    return scores, scores


def test_what_a_user_brings_along_has_no_problem() -> None:
    from xgboost.callback import EvaluationMonitor

    assert problems(label="y", obj=objective, callbacks=[EvaluationMonitor()], maximize=True) == {}


@pytest.mark.parametrize("option", ["obj", "custom_metric"])
def test_names_are_no_functions(option: str) -> None:
    assert "in params" in problems(label="y", **{option: "rmse"})[option].remedy


def test_callbacks_are_xgboosts_and_survive_a_restart() -> None:
    from xgboost.callback import EarlyStopping

    class Sooner(EarlyStopping):  # type: ignore[misc]  # it is Any here
        pass

    for callback in (EarlyStopping(rounds=3), Sooner(rounds=3)):
        remedy = problems(label="y", callbacks=[callback])["callbacks"].remedy
        assert "the option early_stopping_rounds" in remedy
    assert "TrainingCallback" in problems(label="y", callbacks=[print])["callbacks"].remedy
    wrong = problems(label="y", callbacks=EarlyStopping(rounds=3), obj="rmse")
    assert "callbacks=[" in wrong["callbacks"].remedy
    # Nor does it hide what else is wrong.
    assert "in params" in wrong["obj"].remedy


def test_a_model_to_go_on_from_is_there(tmp_path: Path) -> None:
    found = problems(label="y", xgb_model=tmp_path / "model.ubj")["xgb_model"]
    assert "no file" in found.what
    assert str(tmp_path) in found.what
    assert "Booster" in problems(label="y", xgb_model={"trees": 3})["xgb_model"].remedy
    (tmp_path / "model.ubj").touch()
    assert problems(label="y", xgb_model=tmp_path / "model.ubj") == {}


@pytest.mark.parametrize("option", ["obj", "custom_metric", "xgb_model", "maximize"])
def test_with_a_function_nothing_is_brought_along(option: str) -> None:
    assert list(problems(WITH_FUNCTION, **{option: objective})) == [option]


def test_external_memory_is_for_rows_that_can_be_read_again() -> None:
    assert "ranking" in problems(external_memory=True, qid="x")["external_memory"].what
    stream = replace(JOB.datasets["train"], num_rows=None)
    found = problems(replace(JOB, datasets={"train": stream}), external_memory=True)
    assert "materialize" in found["external_memory"].remedy


def names_in(configuration: Any) -> set[str]:
    """All names that have a value in a booster's configuration."""
    if isinstance(configuration, list):
        return {name for part in configuration for name in names_in(part)}
    if not isinstance(configuration, dict):
        return set()
    own = {name for name, value in configuration.items() if isinstance(value, str)}
    return own.union(*map(names_in, configuration.values()))


NOT_PARAMETERS = {"name", "num_feature", "num_trees", "updater_seq"}
"""What XGBoost finds out by itself."""


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"booster": "dart"},
        {"booster": "gblinear"},
        {"tree_method": "exact"},
        {"tree_method": "approx"},
        {"objective": "reg:tweedie"},
        {"objective": "reg:quantileerror", "quantile_alpha": 0.5},
        {"objective": "reg:pseudohubererror"},
        {"objective": "count:poisson"},
        {"objective": "rank:ndcg"},
        {"objective": "multi:softprob", "num_class": 2},
    ],
    ids=str,
)
def test_every_name_in_a_boosters_configuration_is_known(params: dict[str, Any]) -> None:
    import json

    import numpy as np
    import xgboost

    ranked = {"qid": [0] * 20} if params.get("objective") == "rank:ndcg" else {}
    matrix = xgboost.DMatrix(np.arange(40.0).reshape(20, 2), [0, 1] * 10, **ranked)
    booster = xgboost.train(params, matrix, 1)
    names = names_in(json.loads(booster.save_config())) - NOT_PARAMETERS
    assert names <= set(KNOWN_PARAMETERS)
    found = problems(label="y", params=dict.fromkeys(names, 1)).values()
    assert [problem for problem in found if "would ignore it" in problem.what] == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_dept", "max_depth"), ("min_child_wieght", "min_child_weight"), ("etaa", "eta")],
)
def test_a_misspelt_parameter_is_reported_with_the_nearest_name(name: str, meant: str) -> None:
    found = problems(label="y", params={name: 1})
    assert found[f"params[{name!r}]"].remedy == f"Did you mean {meant!r}?"


def test_a_parameter_like_no_other_is_left_to_xgboost() -> None:
    assert problems(label="y", params={"of_my_own_objective": 0.5}) == {}


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"monotone_constraints": {"nope": 1, "x": 1}}, "nope"),
        ({"monotone_constraints": [1]}, "1 entries for 2 features"),
        ({"monotone_constraints": (1, 0, 1)}, "3 entries for 2 features"),
        ({"interaction_constraints": [["x", "nope"], ["w"]]}, "nope"),
        ({"interaction_constraints": [[0, 1]]}, "0, 1 isn't a feature"),
    ],
    ids=str,
)
def test_constraints_are_on_features_that_there_are(params: dict[str, Any], what: str) -> None:
    [problem] = problems(label="y", params=params).values()
    assert problem.field == f"params[{next(iter(params))!r}]"
    assert what in problem.what
    assert "x" in problem.remedy


@pytest.mark.parametrize(
    "params",
    [
        {"monotone_constraints": {"x": 1}},
        {"monotone_constraints": [1, 0]},
        {"monotone_constraints": "(1,0)"},
        {"interaction_constraints": [["x", "w"]]},
        {"interaction_constraints": "[[0, 1]]"},
    ],
    ids=str,
)
def test_constraints_in_any_form_that_xgboost_has_are_right(params: dict[str, Any]) -> None:
    assert problems(label="y", params=params) == {}


@pytest.mark.parametrize("given", [[1, 0], (1, 0), "(1,0)"])
def test_a_list_of_constraints_is_written_as_xgboost_reads_it(given: Any) -> None:
    params = XGBoost(label="y", params={"monotone_constraints": given}).booster_params
    assert params["monotone_constraints"] == "(1,0)"


@pytest.mark.parametrize("option", ["label", "weight", "base_margin", "qid"])
@pytest.mark.parametrize("value", [["x", "y"], 3, {"x"}], ids=repr)
def test_columns_are_named_one_by_one(option: str, value: Any) -> None:
    problem = problems(**{"label": "y", option: value})[option]
    assert ("several columns" in problem.what) == isinstance(value, list)
    assert "column" in problem.remedy


DATA = np.random.default_rng(0).normal(size=(60, 3))
OF_DART = ("normalize_type", "one_drop", "rate_drop", "sample_type", "skip_drop")
OF_RANKING = (
    *("lambdarank_normalization", "lambdarank_num_pair_per_sample", "lambdarank_pair_method"),
    *("lambdarank_score_normalization", "lambdarank_unbiased", "ndcg_exp_gain"),
)
NEEDED = {
    **{name: {"booster": "dart"} for name in OF_DART},
    **{name: {"objective": "rank:ndcg"} for name in OF_RANKING},
    "aft_loss_distribution": {"objective": "survival:aft"},
    "quantile_alpha": {"objective": "reg:quantileerror"},
    "tweedie_variance_power": {"objective": "reg:tweedie"},
}
"""Parameter → the others with which XGBoost reads it."""

TAKES_0 = ("colsample_bylevel", "colsample_bynode", "colsample_bytree", "subsample")


def takes(name: str, value: Any) -> bool:
    """Whether XGBoost itself trains a tree with this value of a parameter."""
    params = {"objective": "binary:logistic", **NEEDED.get(name, {}), name: value}
    labels = (DATA[:, 0] > 0).astype(int)
    try:
        bounds = {"label_lower_bound": labels + 1, "label_upper_bound": labels + 1}
        xgboost.train(params, xgboost.DMatrix(DATA, labels, qid=np.zeros(60), **bounds), 1)
    except xgboost.core.XGBoostError:
        return False
    return True


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_xgboosts(name: str) -> None:
    for value, is_in in values_at_the_ends(RANGES[name]):
        assert (value in RANGES[name]) == is_in
        assert takes(name, value) == (is_in or (value == 0 and name in TAKES_0))


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_xgboosts(name: str) -> None:
    for value, is_one in ((True, 1), ("TRUE", 1), (0, 1), ("1", 1), ("yes", 0), (2, 0)):
        assert takes(name, value) == is_one
        assert (f"params[{name!r}]" in problems(label="y", params={name: value})) != is_one


@pytest.mark.parametrize("name", WORDS)
def test_words_are_xgboosts(name: str) -> None:
    for word in WORDS[name]:
        assert problems(label="y", params={name: word}) == {}
        assert takes(name, word)
        assert not takes(name, word.upper())
        problem = problems(label="y", params={name: word.upper()})[f"params[{name!r}]"]
        assert problem.remedy.endswith(f"There are: {', '.join(sorted(WORDS[name]))}")


SEVERAL_OUTPUTS: list[dict[str, Any]] = [
    {"objective": "multi:softprob", "num_class": 3},
    {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9]},
]


@pytest.mark.parametrize("params", SEVERAL_OUTPUTS)
@pytest.mark.parametrize(
    ("kind", "categorical"),
    [(pa.string(), ()), (pa.dictionary(pa.int8(), pa.string()), ()), (pa.int64(), ("x",))],
)
def test_vector_leaves_take_no_categories(
    params: dict[str, Any], kind: pa.DataType, categorical: tuple[str, ...]
) -> None:
    schema = pa.schema({"x": kind, "w": pa.float64(), "y": pa.int64()})
    job = replace(JOB, num_workers=1, datasets={"train": replace(TRAIN, schema=schema)})
    options: dict[str, Any] = {"label": "y", "categorical": categorical}
    together = {**params, "multi_strategy": "multi_output_tree"}
    [problem] = problems(job, params=together, **options).values()
    assert problem.field == "params['multi_strategy']"
    assert "categories: 'x'" in problem.what
    one_output = {"objective": "reg:squarederror", "multi_strategy": "multi_output_tree"}
    for fine in (params, one_output):
        assert problems(job, params=fine, **options) == {}


@pytest.mark.parametrize("params", SEVERAL_OUTPUTS)
def test_vector_leaves_are_none_of_dart(params: dict[str, Any]) -> None:
    job = replace(JOB, num_workers=1)
    dart = {**params, "booster": "dart"}
    assert problems(job, label="y", params=dart) == {}
    [problem] = problems(
        job, label="y", params={**dart, "multi_strategy": "multi_output_tree"}
    ).values()
    assert "'dart'" in problem.what


@pytest.mark.parametrize("params", SEVERAL_OUTPUTS)
def test_a_column_has_one_first_score(params: dict[str, Any]) -> None:
    [problem] = problems(label="y", base_margin="w", params=params).values()
    assert problem.field == "base_margin"
    assert "one initial score for each row" in problem.what
    one = {"objective": "reg:quantileerror", "quantile_alpha": [0.5]}
    assert problems(label="y", base_margin="w", params=one) == {}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("one_drop", "yes", (True, 0, "1", "False")),
        ("grow_policy", "leaf", ("lossguide",)),
        ("booster", ["dart"], ("gbtree", None)),
        ("eval_metric", 5, ("auc", ("auc",))),
        ("max_cached_hist_node", "few", (8,)),
    ],
)
def test_what_xgboost_refuses_is_refused_before_workers_start(
    name: str, value: Any, allowed: tuple[Any, ...]
) -> None:
    assert f"params[{name!r}]" in problems(label="y", params={name: value})
    for each in allowed:
        assert problems(label="y", params={name: each}) == {}


def test_classes_need_an_objective_that_has_them() -> None:
    params = {"objective": "binary:logistic", "num_class": 2}
    assert "multi:softprob" in problems(label="y", params=params)["params['num_class']"].remedy
    assert problems(label="y", params=params, obj=len) == {}
    assert list(problems(label="y", params={**params, "objective": len})) == ["params['objective']"]
    assert problems(label="y", params={**params, "objective": "multi:softmax"}) == {}
    assert problems(label="y", params={**params, "num_class": 1}) == {}
