"""Everything that is wrong with a job is told at once: its options, its data, its backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from polytrain import (
    DataConfig,
    FailureConfig,
    InvalidJobError,
    RunConfig,
    ScalingConfig,
    Trainer,
    make_trainer,
)
from polytrain.api.backend_checks import missing_options
from polytrain.backends.reference import Reference
from polytrain.boosting.columns import selected

TREES = ["xgboost", "lightgbm"]
DATA = {name: [float(row) for row in range(8)] for name in ("x0", "x1", "label")}


@pytest.mark.parametrize("backend", ["reference", *TREES])
def test_a_good_job_has_no_problem(backend: str) -> None:
    make_trainer(backend, label="label", datasets={"train": DATA})
    make_trainer(backend, lambda: None)


def test_an_unknown_option_has_a_nearest_one(problems: Any) -> None:
    problem = problems(lerning_rate=1).only("lerning_rate")
    assert "reference backend has no such option" in problem.what
    assert "Did you mean 'learning_rate'?" in problem.remedy


def test_an_argument_of_the_trainer_may_be_the_nearest_one(problems: Any) -> None:
    assert "Did you mean 'scaling_config'?" in problems(scaling_conf=1)["scaling_conf"].remedy


NAMED = {"feature": [0.0, 1.0], "target": [0.0, 1.0]}


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("reference", {"label": "tarqet"}),
        *((trees, {"label": "tarqet"}) for trees in TREES),
        *((trees, {"label": "feature", "weight": "tarqet"}) for trees in TREES),
        *((trees, {"label": "feature", "categorical": ["tarqet"]}) for trees in TREES),
        *(
            ("reference", {"label": "target", "dataset_config": {"train": config}})
            for config in (DataConfig(columns=["feature", "tarqet"]), DataConfig(group="tarqet"))
        ),
        ("tensorflow", {"label": "tarqet"}),
        ("tensorflow", {"label": "feature", "features": ["tarqet"]}),
    ],
)
def test_a_column_that_is_not_there_has_a_nearest_one(
    backend: str, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidJobError, match="Did you mean 'target'"):
        make_trainer(backend, datasets={"train": NAMED}, **options).fit()


def test_a_model_that_lacks_a_column_names_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="Did you mean 'target'"):
        selected(pa.table(NAMED), ["feature", "tarqet"])


def test_an_option_far_from_all_others_has_the_list_of_them(problems: Any) -> None:
    problem = problems(zzz=1).only("zzz")
    assert "Did you mean" not in problem.remedy
    assert "rounds, label, learning_rate" in problem.remedy


def test_a_backend_itself_is_for_trainer(problems: Any) -> None:
    problem = problems(Reference(label="label")).only("backend")
    assert "Trainer(…)" in problem.remedy


@dataclass(frozen=True, kw_only=True)
class Demanding(Reference):
    """A backend with an option that has no default."""

    depth: int


def test_an_option_without_a_default_is_required() -> None:
    [problem] = missing_options(Demanding, {"rounds": 3})
    assert problem.field == "depth"
    assert "Pass depth=" in problem.remedy
    assert list(missing_options(Demanding, {"depth": 3})) == []


@pytest.mark.parametrize("backend", ["reference", *TREES])
def test_a_missing_label_column_has_the_list_of_columns(problems: Any, backend: str) -> None:
    problem = problems(backend, label="target").only("label")
    assert "'train' has no column 'target'" in problem.what
    assert "x0, x1, label" in problem.remedy


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("xgboost", {"num_boost_round": np.int64(5), "params": {"max_depth": np.uint8(2)}}),
        ("xgboost", {"early_stopping_rounds": np.int32(5), "params": {"eta": np.float32(0.5)}}),
        ("lightgbm", {"num_boost_round": np.int64(5), "bin_sample_rows": np.int64(100)}),
        ("tensorflow", {"epochs": np.int64(1), "batch_size": np.int64(8), "model": len}),
        ("torch", {"timeout_s": np.float32(60)}),
    ],
)
def test_options_may_be_numbers_of_numpy(backend: str, options: dict[str, Any]) -> None:
    data = {"train": DATA, "valid": DATA}
    if backend == "torch":
        make_trainer(backend, lambda: None, datasets=data, **options)
        return
    compiled = {"compile": {"loss": "mse"}} if backend == "tensorflow" else {}
    make_trainer(backend, label="label", datasets=data, **options, **compiled)


@pytest.mark.parametrize(
    ("backend", "option", "value"),
    [
        ("torch", "timeout_s", "5"),
        ("tensorflow", "timeout_s", "5"),
        ("xgboost", "params", None),
        ("lightgbm", "params", None),
        ("lightgbm", "label", 5),
        ("xgboost", "categorical", True),
        ("lightgbm", "categorical", 5),
    ],
)
def test_an_option_of_the_wrong_type_is_a_problem(
    problems: Any, backend: str, option: str, value: Any
) -> None:
    """A backend's `problems` tells; it never raises."""
    if backend in TREES:
        found = problems(backend, **{option: value})
    else:
        found = problems(backend, lambda: None, **{option: value})
    assert repr(value) in found.only(option).what


@pytest.mark.parametrize("rounds", [0, -1, "3"])
@pytest.mark.parametrize("backend", TREES)
def test_patience_is_a_number_of_rounds(problems: Any, backend: str, rounds: Any) -> None:
    """With 0, XGBoost would stop after its first round."""
    data = {"train": DATA, "valid": DATA}
    found = problems(backend, datasets=data, early_stopping_rounds=rounds)
    assert repr(rounds) in found.only("early_stopping_rounds").what


def test_a_backends_name_is_no_backend(problems: Any) -> None:
    message = problems.of(lambda: Trainer("reference", lambda: None))
    assert "make_trainer" in message.only("backend").remedy


@pytest.mark.parametrize("backend", ["reference", *TREES])
def test_a_label_is_required(problems: Any, backend: str) -> None:
    assert "required" in problems(backend, label=None).only("label").what


@pytest.mark.parametrize("backend", TREES)
def test_a_missing_weight_column_has_the_list_of_columns(problems: Any, backend: str) -> None:
    assert "x0, x1, label" in problems(backend, weight="w").only("weight").remedy


@pytest.mark.parametrize("backend", ["reference", *TREES])
def test_training_without_data_is_refused(problems: Any, backend: str) -> None:
    assert '{"train": …}' in problems(backend, datasets={}).only("datasets").remedy
    problem = problems(backend, datasets={"valid": DATA}).only("datasets")
    assert "'train'" in problem.what
    assert "'valid'" in problem.what, "what there is instead isn't named"


def test_data_without_rows_is_refused_by_its_name(problems: Any, tmp_path: Path) -> None:
    found = problems(datasets={"train": DATA, "valid": {"x": []}})
    assert "no rows" in found.only("datasets['valid']").what


def test_a_path_that_matches_nothing_is_reported(problems: Any, tmp_path: Path) -> None:
    found = problems(datasets={"train": f"{tmp_path}/*.parquet"})
    assert f"{tmp_path}/*.parquet" in found.only("datasets['train']").what


def test_data_sets_have_names(problems: Any) -> None:
    assert "is a list" in problems(datasets=[DATA])["datasets"].what


def test_fewer_rows_than_workers_are_refused(problems: Any) -> None:
    found = problems(scaling_config=ScalingConfig(num_workers=9))
    problem = found.only("datasets['train']")
    assert "8 rows" in problem.what
    assert "9 workers" in problem.what


@dataclass(frozen=True, kw_only=True)
class NotInstalled(Reference):
    """A backend whose framework is missing."""

    requires: ClassVar[dict[str, str]] = {"framework_of_nobody": "pip install framework"}


def test_a_missing_framework_is_reported_with_its_install_line(problems: Any) -> None:
    backend = NotInstalled(label="label")
    problem = problems.of(lambda: Trainer(backend, datasets={"train": DATA})).only("backend")
    assert "framework_of_nobody" in problem.what
    assert "pip install framework" in problem.remedy


def test_a_gpu_that_the_backend_does_not_use_is_refused(problems: Any) -> None:
    found = problems(scaling_config=ScalingConfig(use_gpu=True))
    assert "can't train on a GPU" in found.only("ScalingConfig.use_gpu").what


def test_everything_is_reported_at_once(problems: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    found = problems(
        "xgboost",
        lables="label",
        num_boost_round=0,
        label=None,
        weight="w",
        early_stopping_rounds=3,
        train_loop_config={},
        datasets={"train": DATA, "valid": f"{tmp_path}/*.csv", "test": {"x": []}},
        scaling_config=ScalingConfig(num_workers=-1, placement_strategy="NEAR"),
        run_config=RunConfig(
            storage_path=tmp_path / "file", failure_config=FailureConfig(max_failures=-2)
        ),
    )
    assert set(found) >= {
        "lables",
        "num_boost_round",
        "label",
        "weight",
        "train_loop_config",
        "datasets['valid']",
        "datasets['test']",
        "ScalingConfig.num_workers",
        "ScalingConfig.placement_strategy",
        "RunConfig.storage_path",
        "FailureConfig.max_failures",
    }


def test_both_doors_tell_the_same(problems: Any) -> None:
    message = problems(label="target")
    backend = Reference(label="target")
    assert message == problems.of(lambda: Trainer(backend, datasets={"train": DATA}))


@pytest.mark.parametrize("backend", ["torch", "xgboost"])
def test_gpus_of_workers_that_do_not_use_them(problems: Any, backend: str) -> None:
    scaling = ScalingConfig(resources_per_worker={"GPU": 2})
    problem = problems(backend, lambda: None, scaling_config=scaling).only("ScalingConfig.use_gpu")
    assert "gives a worker 2 GPU" in problem.what
    # A training function may use OpenCL, which this backend doesn't.
    make_trainer("lightgbm", lambda: None, scaling_config=scaling)
