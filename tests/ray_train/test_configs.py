"""Configurations as they are written for Ray Train: every argument has a place or a sentence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polytrain as train
from polytrain.config.ray_arguments import CHECKPOINT, DATA, FAILURE, RUN, SCALING, Absent

CONFIGS: dict[Any, dict[str, Any]] = {
    train.ScalingConfig: SCALING,
    train.DataConfig: DATA,
    train.FailureConfig: FAILURE,
    train.CheckpointConfig: CHECKPOINT,
    train.RunConfig: RUN,
}
ABSENT = [(cls, name, each) for cls, of in CONFIGS.items() for name, each in of["absent"].items()]


@pytest.mark.parametrize(("cls", "name", "absent"), ABSENT)
def test_an_argument_that_is_not_here_has_a_sentence(
    cls: Any, name: str, absent: Absent, caplog: pytest.LogCaptureFixture
) -> None:
    assert cls(**{name: absent.default}) == cls(**{name: None}) == cls()
    assert not caplog.records
    if absent.is_harmless:
        with caplog.at_level(logging.WARNING):
            assert cls(**{name: "other"}) == cls()
        assert f"{cls.__name__}.{name} isn't used. {absent.instead}." in caplog.text
        return
    with pytest.raises(train.InvalidJobError) as caught:
        cls(**{name: "other"})
    [problem] = caught.value.problems
    assert problem.field == f"{cls.__name__}.{name}"
    assert problem.remedy == absent.instead


def test_arguments_without_names_are_ray_trains() -> None:
    assert train.ScalingConfig(None, 3, False, {"CPU": 2}, "SPREAD") == train.ScalingConfig(
        num_workers=3, resources_per_worker={"CPU": 2}, placement_strategy="SPREAD"
    )
    assert train.FailureConfig(3) == train.FailureConfig(max_failures=3)
    assert train.CheckpointConfig(2, "loss", "min") == train.CheckpointConfig(
        num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    assert train.RunConfig("name", "/runs", None, None, None) == train.RunConfig(
        name="name", storage_path="/runs"
    )
    assert train.DataConfig(["train"]) == train.DataConfig(datasets_to_split=["train"])


def test_a_type_of_accelerator_is_a_resource_of_each_worker() -> None:
    resources = train.ScalingConfig(accelerator_type="A100", use_gpu=True).resources
    assert resources == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:A100": 0.001}


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: train.ScalingConfig(num_worker=2), "Did you mean 'num_workers'"),
        (lambda: train.FailureConfig(1, max_failures=2), "max_failures: it is given twice"),
        (lambda: train.DataConfig(1, 2, 3, 4), "4 values without names.*The order is"),
        (lambda: train.RunConfig(progress_reporter=1, sync_config=1), "2 problems"),
    ],
)
def test_a_call_that_fits_nowhere_is_explained(make: Any, what: str) -> None:
    with pytest.raises(train.InvalidJobError, match=f"(?s){what}"):
        make()


def reads_both() -> None:
    whole = train.get_dataset_shard("valid")
    seen = [
        int(x) for _ in range(2) for batch in whole.iter_batches(batch_size=3) for x in batch["x"]
    ]
    assert seen == [*range(7)] * 2
    assert len(whole.to_arrow()) == len(whole) == 7
    assert len(train.get_dataset_shard("train").to_arrow()) == 4
    train.report({"valid": len(seen)})


def test_a_data_set_that_is_not_split_is_read_whole_by_every_worker(tmp_path: Path) -> None:
    result = train.DataParallelTrainer(
        reads_both,
        datasets={"train": {"x": np.arange(8)}, "valid": {"x": np.arange(7)}},
        dataset_config=train.DataConfig(datasets_to_split=["train"]),
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=tmp_path, progress=False),
    ).fit()
    assert result.metrics == {"valid": 14}


@pytest.mark.parametrize(
    ("names", "what"),
    [(["valdi"], "there is no data set 'valdi'"), ("train", "'train' isn't a list of names")],
)
def test_names_of_data_sets_to_split_are_checked(names: Any, what: str) -> None:
    with pytest.raises(train.InvalidJobError, match=what):
        train.DataParallelTrainer(
            reads_both,
            datasets={"train": {"x": np.arange(8)}},
            dataset_config=train.DataConfig(datasets_to_split=names),
        )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tf", "Did you mean 'tensorflow'"),
        ("keras", "Did you mean 'tensorflow'"),
        ("xgb", "Did you mean 'xgboost'"),
        ("lgbm", "Did you mean 'lightgbm'"),
        ("pytorch", "Did you mean 'torch'"),
        ("jax", "docs/jax.md"),
    ],
)
def test_other_names_of_a_framework_lead_to_the_backend(name: str, meant: str) -> None:
    with pytest.raises(train.PolytrainError, match=meant):
        train.make_trainer(name)


def test_an_unknown_argument_of_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(train.TrainingFailedError, match="unexpected keyword argument 'chekpoint'"):
        train.DataParallelTrainer(
            lambda: train.report({"loss": 1.0}, chekpoint=None),  # type: ignore[call-arg]  # the point
            scaling_config=train.ScalingConfig(num_workers=0),
            run_config=train.RunConfig(storage_path=tmp_path, progress=False),
        ).fit()


def test_the_classes_of_ray_train_itself_are_named_with_the_import_that_is_needed() -> None:
    import ray.train
    import ray.train.torch

    with pytest.raises(train.InvalidJobError) as caught:
        train.torch.TorchTrainer(
            lambda: None,
            scaling_config=ray.train.ScalingConfig(num_workers=1),
            run_config=ray.train.RunConfig(name="run"),
            dataset_config=ray.train.DataConfig(),
            validation_config=ray.train.ValidationConfig(fn=lambda checkpoint: {}),
            resume_from_checkpoint=ray.train.Checkpoint("/nowhere"),
        )
    wrong = {each.what: each.remedy for each in caught.value.problems}
    names = ("ScalingConfig", "RunConfig", "DataConfig", "ValidationConfig", "Checkpoint")
    for name in names:
        import_ = f"Import polytrain's: from polytrain import {name}"
        assert wrong[f"it is ray.train's {name}"] == import_
    with pytest.raises(train.InvalidJobError, match=r"from polytrain\.torch import TorchConfig"):
        train.torch.TorchTrainer(lambda: None, torch_config=ray.train.torch.TorchConfig())
