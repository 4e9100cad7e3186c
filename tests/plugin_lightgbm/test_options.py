"""LightGBM's driver half: parameters that are the run's own are refused, each with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polytrain import NotInWorkerError
from polytrain.api.backend_checks import backend_problems
from polytrain_lightgbm import LightGBM, network_params
from polytrain_lightgbm.known_parameters import ALIASES
from polytrain_lightgbm.parameters import (
    PARAMETERS,
    PARAMETERS_OF_FEATURES,
    parallel_params,
    without,
)
from polytrain_plugins import DatasetInfo, Job, Problem

TRAIN = DatasetInfo(name="train", columns=("x", "w", "y"), num_rows=100)
JOB = Job(
    num_workers=4,
    use_gpu=False,
    cpus_per_worker=1,
    has_training_function=False,
    datasets={"train": TRAIN, "valid": replace(TRAIN, name="valid")},
)
ALONE = replace(JOB, num_workers=1)
WITH_FUNCTION = replace(JOB, has_training_function=True)


def problems(job: Job = JOB, **options: Any) -> dict[str, Problem]:
    return {problem.field: problem for problem in LightGBM(label="y", **options).problems(job)}


def test_usual_options_have_no_problem() -> None:
    params = {"objective": "binary", "num_leaves": 7, "tree_learner": "data", "metric": "auc"}
    assert problems(params=params, weight="w", early_stopping_rounds=2, num_boost_round=5) == {}


OURS = {
    "num_machines": "ScalingConfig(num_workers=…)",
    "machines": "Leave it out",
    "local_listen_port": "Leave it out",
    "pre_partition": "Leave it out",
    "early_stopping_round": "early_stopping_rounds",
    "num_iterations": "num_boost_round",
    "machine_list_filename": "Leave it out",
}


def spellings(parameter: str) -> set[str]:
    """LightGBM's own table of a parameter's names."""
    from lightgbm.basic import _ConfigAliases

    found: set[str] = _ConfigAliases.get(parameter)
    assert parameter in found
    return found


@pytest.mark.parametrize("parameter", OURS)
def test_what_the_run_decides_is_refused_in_every_spelling(parameter: str) -> None:
    """LightGBM would take an alias silently, and train for another number of rounds, or alone."""
    accepted = {name for name in spellings(parameter) if not problems(params={name: 3})}
    assert accepted == set()


@pytest.mark.parametrize("parameter", ["interaction_constraints", "forcedsplits_filename"])
def test_what_several_machines_fail_with_is_refused_in_every_spelling(parameter: str) -> None:
    for name in spellings(parameter):
        for given in ([[0, 1]], np.array([[0, 1]])):
            [problem] = problems(params={name: given}).values()
            assert problem.field == f"params[{name!r}]"
            assert "several machines" in problem.what


def test_positions_are_refused_where_lightgbm_would_ignore_them() -> None:
    params = {"lambdarank_position_bias_regularization": 0.5}
    assert "positions" in problems(params=params)[f"params[{next(iter(params))!r}]"].what


def test_linear_trees_are_refused_in_every_spelling() -> None:
    for name in spellings("linear_tree"):
        for given in (True, "true", "+"):
            assert "one worker" in problems(params={name: given})[f"params[{name!r}]"].what
        for given in (False, "False", "-"):
            assert problems(params={name: given}) == {}


def test_switches_are_read_as_lightgbm_reads_them() -> None:
    off = LightGBM(params={"boost_from_average": "false", "objective": "l1", "reg_sqrt": "false"})
    assert not off.begins_with_a_score
    assert off.renews_leaves
    assert LightGBM(params={"boost_from_average": "TRUE"}).begins_with_a_score


@pytest.mark.parametrize("objective", ["l1", "quantile", "mape"])
def test_percentiles_have_no_constraints(objective: str) -> None:
    for name in spellings("monotone_constraints"):
        for given in ([1, 0], np.array([1, 0])):
            found = problems(params={"objective": objective, name: given})
            assert objective in found["params['monotone_constraints']"].what
        assert problems(params={"objective": objective, name: []}) == {}
    assert problems(params={"objective": "huber", "monotone_constraints": [1, 0]}) == {}


def test_a_penalty_of_new_features_repeats_all_rounds() -> None:
    for given in ([1.0, 2.0], np.array([1.0, 2.0])):
        assert LightGBM(params={"cegb_penalty_feature_lazy": given}).needs_all_rounds
    assert not LightGBM(params={"cegb_penalty_feature_lazy": []}).needs_all_rounds


@pytest.mark.parametrize("parameter", ["feature_contri", "max_bin_by_feature"])
def test_what_is_said_of_each_feature_has_an_entry_for_each(parameter: str) -> None:
    for name in spellings(parameter):
        assert "3 entries for 2" in problems(params={name: [2, 2, 2]})[f"params[{name!r}]"].what
        for fine in ([2, 2], np.array([2, 2]), []):
            assert problems(params={name: fine}) == {}


@pytest.mark.parametrize(
    "parameter",
    [
        *("monotone_constraints", "feature_contri", "max_bin_by_feature", "forcedbins_filename"),
        *("cegb_penalty_feature_lazy", "cegb_penalty_feature_coupled"),
    ],
)
def test_what_is_said_of_each_feature_is_left_out_where_there_are_none(parameter: str) -> None:
    """In every spelling; LightGBM reads memory that isn't its own otherwise."""
    params = {name: [1, 0, 1] for name in spellings(parameter)}
    assert without({**params, "learning_rate": 0.1}, PARAMETERS_OF_FEATURES) == {
        "learning_rate": 0.1
    }


@pytest.mark.parametrize("parameter", list(OURS)[:6])
def test_what_is_refused_has_a_reason_and_a_remedy(parameter: str) -> None:
    [problem] = problems(params={parameter: 3}).values()
    assert problem.field == f"params[{parameter!r}]"
    assert problem.what.startswith("it is ")
    assert OURS[parameter] in problem.remedy


def test_more_threads_than_a_worker_has_are_refused() -> None:
    [problem] = problems(params={"nthreads": 2}).values()
    assert "2 threads" in problem.what
    assert "resources_per_worker" in problem.remedy


def test_parameters_of_xgboost_are_told_from_lightgbms() -> None:
    [problem] = problems(params={"eval_metric": "auc"}).values()
    assert "XGBoost" in problem.what
    assert "'metric'" in problem.remedy


@pytest.mark.parametrize(
    ("parameter", "value", "what"),
    [("max_depth", "three", "a whole number"), ("eta", "fast", "a number")],
)
def test_numbers_are_numbers_in_every_spelling(parameter: str, value: str, what: str) -> None:
    [(field, problem)] = problems(params={parameter: value}).items()
    assert field == f"params[{parameter!r}]"
    assert f"{value!r} is not {what}" in problem.what
    for allowed in ("3", 3, None):
        assert problems(params={parameter: allowed}) == {}


def test_lightgbms_other_names_are_known() -> None:
    known = {name: {name, *others} for name, others in ALIASES.items()}
    assert known == {name: spellings(name) for name in ALIASES}
    assert problems(params={"max_leaves": 7}) == {}


def test_a_model_to_go_on_from_is_there(tmp_path: Path) -> None:
    found = problems(init_model=str(tmp_path / "model.txt"))["init_model"]
    assert "no file" in found.what
    assert str(tmp_path) in found.what
    assert "lightgbm.Booster" in problems(init_model={"trees": 3})["init_model"].remedy
    (tmp_path / "model.txt").touch()
    assert problems(init_model=str(tmp_path / "model.txt")) == {}


@pytest.mark.parametrize(
    "given",
    [
        {"weight": "w"},
        {"params": {"bagging_fraction": 0.5, "bagging_freq": 1}},
        {"params": {"subsample": 0.5, "subsample_freq": 2}},
    ],
)
def test_weights_that_lightgbm_would_take_from_one_row_are_refused(given: dict[str, Any]) -> None:
    """It would find bad splits, or none if the first row of a worker weighs nothing."""
    params = given.get("params", {})
    for name in ("mape", "mean_absolute_percentage_error"):
        [problem] = problems(**{**given, "params": {**params, "objective": name}}).values()
        assert problem.field == "params['objective']"
        assert "'l1'" in problem.remedy
    assert problems(**{**given, "params": {**params, "objective": "l1"}}) == {}
    for harmless in ({}, {"bagging_fraction": 1.0, "bagging_freq": 1}, {"bagging_fraction": 0.5}):
        assert problems(params={"objective": "mape", **harmless}) == {}
    if not params:
        goss = {"objective": "mape", "data_sample_strategy": "goss"}
        assert problems(**{**given, "params": goss}) == {}


def test_an_objective_that_divides_by_weights_is_refused_where_some_are_0() -> None:
    bagging = {"bagging_fraction": 0.5, "bagging_freq": 1}
    [problem] = problems(params={"objective": "xentlambda", **bagging}).values()
    assert problem.field == "params['objective']"
    assert "bagging" in problem.what
    for harmless in ({"objective": "xentlambda"}, {"objective": "xentropy", **bagging}):
        assert problems(params=harmless) == {}


def test_what_forests_do_not_take_is_refused() -> None:
    forest = {"boosting": "Random_Forest", "feature_fraction": 0.5}
    functions = {**forest, "objective": lambda scores, data: (scores, scores)}
    assert "random forests" in problems(params=functions)["params['boosting']"].what
    assert "no initial scores" in problems(params=forest, init_score="x")["init_score"].what
    assert problems(params=forest) == {}


def test_what_lightgbm_would_do_by_chance_is_refused() -> None:
    dart = {"boosting": "dart", "objective": lambda scores, data: (scores, scores)}
    for name in ("dart", "DART"):
        [problem] = problems(params={**dart, "boosting": name}).values()
        assert problem.field == "params['boosting']"
        assert "other trees in every run" in problem.what
    assert problems(params={**dart, "objective": "binary"}) == {}


def test_columns_that_are_no_features_are_no_categories() -> None:
    assert set(problems(categorical=["x"])) == set()
    assert "['x']" in problems(categorical="x")["categorical"].remedy
    assert "isn't a feature" in problems(categorical=["y"])["categorical"].what


def test_a_callback_that_a_restart_would_break_is_refused() -> None:
    import lightgbm

    found = problems(callbacks=[lightgbm.early_stopping(3), lightgbm.record_evaluation({})])
    assert "early_stopping_rounds" in found["callbacks"].remedy
    wrong = problems(callbacks=lightgbm.log_evaluation(), feval="auc")
    assert "callbacks=[" in wrong["callbacks"].remedy
    # Nor does it hide what else is wrong.
    assert "'metric'" in wrong["feval"].remedy


@pytest.mark.parametrize("feval", ["auc", [print, 5]])
def test_a_metric_of_ones_own_is_a_function(feval: Any) -> None:
    assert "'metric'" in problems(feval=feval)["feval"].remedy
    assert problems(feval=[print]) == {}


def test_every_refused_parameter_is_reported() -> None:
    found = problems(params={"num_machines": 2, "machines": "a:1", "n_estimators": 9})
    assert sorted(found) == [
        "params['machines']",
        "params['n_estimators']",
        "params['num_machines']",
    ]


@pytest.mark.parametrize(
    ("learner", "reason"),
    [
        ("serial", "a model of its own"),
        ("feature", "all rows on every worker"),
        ("voting", "different models"),
        ("feature_parallel", "all rows on every worker"),
        ("voting_parallel", "different models"),
    ],
)
@pytest.mark.parametrize("parameter", sorted(spellings("tree_learner")))
def test_other_tree_learners_are_refused_with_the_reason(
    parameter: str, learner: str, reason: str
) -> None:
    [problem] = problems(params={parameter: learner}).values()
    assert "4 workers" in problem.what
    assert reason in problem.what
    assert "num_workers=1" in problem.remedy
    assert problems(ALONE, params={parameter: learner}) == {}


@pytest.mark.parametrize("rounds", [0, -1, 2.5, "ten"])
def test_rounds_are_a_whole_number(rounds: Any) -> None:
    assert repr(rounds) in problems(num_boost_round=rounds)["num_boost_round"].what


def test_early_stopping_needs_a_data_set_to_look_at() -> None:
    found = problems(replace(JOB, datasets={"train": TRAIN}), early_stopping_rounds=3)
    assert "valid" in found["early_stopping_rounds"].remedy


def test_columns_are_looked_for_in_every_data_set() -> None:
    valid = DatasetInfo(name="valid", columns=("x",), num_rows=3)
    found = list(LightGBM(label="y").problems(replace(JOB, datasets={"valid": valid})))
    assert ["'valid' has no column 'y'" in problem.what for problem in found] == [True]


def test_with_a_function_the_options_stay_unset() -> None:
    mixed = LightGBM(label="y", params={"num_leaves": 3}, early_stopping_rounds=2)
    messages = [problem.field for problem in mixed.problems(WITH_FUNCTION)]
    assert sorted(messages) == ["early_stopping_rounds", "label", "params"]
    assert list(LightGBM().problems(WITH_FUNCTION)) == []


def test_a_rank_that_evaluates_has_all_rows() -> None:
    assert LightGBM(label="y").demand(JOB).whole_datasets == {"valid"}
    assert LightGBM().demand(WITH_FUNCTION).whole_datasets == frozenset()


def test_workers_train_on_their_own_rows_together() -> None:
    assert parallel_params(1) == {}
    params = parallel_params(3)
    assert (params["num_machines"], params["tree_learner"]) == (3, "data")
    assert params["pre_partition"] is True, "without it each rank would drop rows of its shard"


def test_a_parameter_that_is_none_is_not_given() -> None:
    assert problems(params=dict.fromkeys(every_name())) == {}
    options = LightGBM(params=dict.fromkeys(every_name()))
    assert (options.seed, options.objective, options.draws_rows) == (0, "regression", False)
    assert options.booster_params(2)["num_threads"] == 2


def test_network_params_belong_inside_a_training_function() -> None:
    with pytest.raises(NotInWorkerError):
        network_params()


@pytest.mark.parametrize("parameter", sorted(spellings("device_type")))
@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_other_devices_are_refused_with_the_reason(parameter: str, device: str) -> None:
    [problem] = problems(params={parameter: device}).values()
    assert "no CUDA" in problem.what
    assert "XGBoost" in problem.remedy
    assert problems(params={parameter: "cpu"}) == {}


@pytest.mark.parametrize("job", [JOB, WITH_FUNCTION], ids=["options", "function"])
def test_gpus_are_refused_once_and_with_the_reason(job: Job) -> None:
    backend = LightGBM() if job.has_training_function else LightGBM(label="y")
    [problem] = backend_problems(backend, replace(job, use_gpu=True))
    assert problem.field == "ScalingConfig.use_gpu"
    assert "no CUDA" in problem.what
    assert "XGBoost" in problem.remedy
    assert "resources_per_worker={'GPU': 1}" in problem.remedy


def every_name() -> list[str]:
    """All names of parameters that the installed LightGBM has, aliases included."""
    from lightgbm.basic import _ConfigAliases

    known = _ConfigAliases._get_all_param_aliases()
    return sorted({*known, *(name for names in known.values() for name in names)})


def test_every_name_that_lightgbm_has_is_known() -> None:
    assert set(every_name()) <= PARAMETERS.names


def test_no_name_of_lightgbms_passes_for_a_misspelt_one() -> None:
    found = problems(params=dict.fromkeys(every_name(), 1)).values()
    assert [problem for problem in found if "would ignore it" in problem.what] == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [("num_leavs", "num_leaves"), ("max_dept", "max_depth"), ("learnin_rate", "learning_rate")],
)
def test_a_misspelt_parameter_is_reported_with_the_nearest_name(name: str, meant: str) -> None:
    assert problems(params={name: 7})[f"params[{name!r}]"].remedy == f"Did you mean {meant!r}?"


def test_a_parameter_like_no_other_is_left_to_lightgbm() -> None:
    assert problems(params={"of_my_own_objective": 0.5}) == {}


@pytest.mark.parametrize(
    "parameter",
    [
        *("config", "convert_model", "data", "group_column", "ignore_column", "input_model"),
        *("label_column", "output_model", "output_result", "save_binary", "snapshot_freq"),
        *("task", "valid", "weight_column"),
    ],
)
def test_what_only_its_command_line_reads_is_refused_in_every_spelling(parameter: str) -> None:
    for name in spellings(parameter):
        assert "command-line program" in problems(params={name: "x"})[f"params[{name!r}]"].what


@pytest.mark.parametrize("name", ["tree_learner", "tree", "tree_type"])
def test_an_unknown_learner_is_reported_with_those_that_there_are(name: str) -> None:
    problem = problems(params={name: "nonsense"})[f"params[{name!r}]"]
    assert "There are: data, feature, serial, voting" in problem.remedy


def test_constraints_have_an_entry_for_each_feature() -> None:
    """The label isn't one; here the weights are."""
    assert problems(params={"mc": [1, 0]}) == {}
    for wrong in ([1], [1, 0, -1]):
        problem = problems(params={"mc": wrong})["params['mc']"]
        assert problem.what == f"it has {len(wrong)} entries for 2 features"
    assert "Give a list" in problems(params={"mc": {"x": 1}})["params['mc']"].remedy


@pytest.mark.parametrize("option", ["label", "weight", "init_score", "group"])
@pytest.mark.parametrize("value", [["x", "y"], 3], ids=repr)
def test_columns_are_named_one_by_one(option: str, value: Any) -> None:
    found = {p.field: p for p in LightGBM(**{"label": "y", option: value}).problems(JOB)}
    assert ("several columns" in found[option].what) == isinstance(value, list)


@pytest.mark.parametrize(
    "params",
    [
        {"objective": "softmax", "num_classes": 3},
        {"objective": "ova", "num_class": 3},
        {"objective": len, "num_class": 3},
    ],
)
def test_a_column_has_one_first_score(params: dict[str, Any]) -> None:
    [problem] = problems(params=params, init_score="w").values()
    assert problem.field == "init_score"
    assert "one initial score for each row" in problem.what
    assert problems(params={"objective": "binary"}, init_score="w") == {}


def test_bins_of_a_file_that_does_not_exist(tmp_path: Path) -> None:
    file = tmp_path / "bins.json"
    params = {"forcedbins_filename": str(file)}
    [problem] = problems(params=params).values()
    assert problem.field == "params['forcedbins_filename']"
    assert f"there is no file '{file}'" in problem.what
    file.write_text("[]")
    assert problems(params=params) == {}


@pytest.mark.parametrize("value", [1, 0, "yes", 2.0])
@pytest.mark.parametrize("name", ["extra_trees", "unbalance", "first_metric_only"])
def test_switches_that_lightgbm_refuses_are_refused_before_workers_start(
    name: str, value: Any
) -> None:
    problem = problems(params={name: value})[f"params[{name!r}]"]
    assert f"it must be True or False; got {value!r}" in problem.what
    for allowed in (True, False, "true", "+", None):
        assert problems(params={name: allowed}) == {}
