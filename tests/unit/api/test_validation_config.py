"""What is wrong with the configuration of a run: workers, failures, storage, cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.problems import GOOD

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    Trainer,
    make_trainer,
)
from polytrain.api.cluster_checks import cluster_problems
from polytrain.config.constraints import field_problems

DATA = {"x": [1.0, 2.0], "label": [1.0, 2.0]}


@pytest.mark.parametrize("count", [-1, "2", 1.5, None, True])
def test_a_number_of_workers_is_a_whole_number(problems: Any, count: Any) -> None:
    found = problems(scaling_config=ScalingConfig(num_workers=count))
    problem = found.only("ScalingConfig.num_workers")
    assert repr(count) in problem.what
    assert "1 or more, or 0" in problem.remedy


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ScalingConfig(resources_per_worker={"CPU": "two"}), "ScalingConfig.resources_per_worker"),
        (ScalingConfig(resources_per_worker={"CPU": -1}), "ScalingConfig.resources_per_worker"),
        (ScalingConfig(resources_per_worker=["CPU"]), "ScalingConfig.resources_per_worker"),
        (ScalingConfig(resources_per_worker={"CPU": 0}), "ScalingConfig.resources_per_worker"),
        (ScalingConfig(resources_per_worker={"cpu": 4}), "ScalingConfig.resources_per_worker"),
        (ScalingConfig(resources_per_worker={"gpu": 0}), "ScalingConfig.resources_per_worker"),
        (
            ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0}),
            "ScalingConfig.use_gpu",
        ),
        (ScalingConfig(use_gpu="no"), "ScalingConfig.use_gpu"),
        (ScalingConfig(use_gpu=2), "ScalingConfig.use_gpu"),
        (ScalingConfig(use_gpu=1.0), "ScalingConfig.use_gpu"),
        (ScalingConfig(placement_strategy="NEAR"), "ScalingConfig.placement_strategy"),
        (ScalingConfig(num_workers=0, use_gpu=True), "ScalingConfig.use_gpu"),
        (ScalingConfig(num_workers=(0, 2)), "ScalingConfig.num_workers"),
        (ScalingConfig(num_workers=(3, 2)), "ScalingConfig.num_workers"),
        (ScalingConfig(num_workers=(1, 2, 3)), "ScalingConfig.num_workers"),
        (ScalingConfig(num_workers=[1, 2]), "ScalingConfig.num_workers"),
        (ScalingConfig(num_workers=(1, None)), "ScalingConfig.num_workers"),
        (ScalingConfig(standby=-1), "ScalingConfig.standby"),
        (ScalingConfig(standby=True), "ScalingConfig.standby"),
        (ScalingConfig(num_workers=0, standby=1), "ScalingConfig.standby"),
        (ScalingConfig(start_timeout_s="soon"), "ScalingConfig.start_timeout_s"),
        (
            ScalingConfig(num_workers=(1, 2), placement_strategy="STRICT_PACK"),
            "ScalingConfig.placement_strategy",
        ),
        (4, "scaling_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_scaling_that_makes_no_sense(problems: Any, config: Any, field: str) -> None:
    problems(scaling_config=config).only(field)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (RunConfig(name="a/b"), "RunConfig.name"),
        (RunConfig(name=""), "RunConfig.name"),
        (RunConfig(name=5), "RunConfig.name"),
        (RunConfig(name="."), "RunConfig.name"),
        (RunConfig(name=".."), "RunConfig.name"),
        (RunConfig(name="a\0b"), "RunConfig.name"),
        (RunConfig(name="a\nb"), "RunConfig.name"),
        (RunConfig(name="a" * 256), "RunConfig.name"),
        (RunConfig(name="\u00e9" * 128), "RunConfig.name"),
        (
            RunConfig(failure_config=FailureConfig(hang_timeout_s=float("inf"))),
            "FailureConfig.hang_timeout_s",
        ),
        (
            RunConfig(checkpoint_config=CheckpointConfig(checkpoint_score_attribute=3)),
            "CheckpointConfig.checkpoint_score_attribute",
        ),
        (
            RunConfig(checkpoint_config=CheckpointConfig(checkpoint_score_attribute="")),
            "CheckpointConfig.checkpoint_score_attribute",
        ),
        (RunConfig(failure_config=3), "RunConfig.failure_config"),
        (RunConfig(failure_config=FailureConfig(max_failures=-2)), "FailureConfig.max_failures"),
        (
            RunConfig(failure_config=FailureConfig(retry_user_errors="once")),
            "FailureConfig.retry_user_errors",
        ),
        (RunConfig(failure_config=FailureConfig(hang_timeout_s=0)), "FailureConfig.hang_timeout_s"),
        (
            RunConfig(failure_config=FailureConfig(hang_action="stop")),
            "FailureConfig.hang_action",
        ),
        (
            RunConfig(failure_config=FailureConfig(rendezvous_timeout_s=None)),
            "FailureConfig.rendezvous_timeout_s",
        ),
        (RunConfig(failure_config=FailureConfig(stragglers="kill")), "FailureConfig.stragglers"),
        (
            RunConfig(failure_config=FailureConfig(stragglers="replace")),
            "FailureConfig.stragglers",
        ),
        (
            RunConfig(failure_config=FailureConfig(straggler_window_s=0)),
            "FailureConfig.straggler_window_s",
        ),
        (
            RunConfig(failure_config=FailureConfig(straggler_window_s=None)),
            "FailureConfig.straggler_window_s",
        ),
        (
            RunConfig(failure_config=FailureConfig(node_cooldown_s=-1)),
            "FailureConfig.node_cooldown_s",
        ),
        (RunConfig(checkpoint_config={}), "RunConfig.checkpoint_config"),
        (
            RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=0)),
            "CheckpointConfig.num_to_keep",
        ),
        (
            RunConfig(checkpoint_config=CheckpointConfig(checkpoint_frequency=-1)),
            "CheckpointConfig.checkpoint_frequency",
        ),
        (
            RunConfig(checkpoint_config=CheckpointConfig(checkpoint_score_order="up")),
            "CheckpointConfig.checkpoint_score_order",
        ),
        (
            RunConfig(checkpoint_config=CheckpointConfig(written_by="rank 0")),
            "CheckpointConfig.written_by",
        ),
        (
            RunConfig(checkpoint_config=CheckpointConfig(upload="later")),
            "CheckpointConfig.upload",
        ),
        (
            RunConfig(checkpoint_config=CheckpointConfig(upload=None)),
            "CheckpointConfig.upload",
        ),
        (
            RunConfig(checkpoint_config=CheckpointConfig(max_in_flight=0)),
            "CheckpointConfig.max_in_flight",
        ),
        *(
            (RunConfig(checkpoint_config=CheckpointConfig(memory=each)), "CheckpointConfig.memory")
            for each in (0, -1, True, 1.5, "always")
        ),
        (
            RunConfig(checkpoint_config=CheckpointConfig(report_timeout_s=-1)),
            "CheckpointConfig.report_timeout_s",
        ),
        (RunConfig(storage_timeout_s="long"), "RunConfig.storage_timeout_s"),
        (RunConfig(storage_path=5), "RunConfig.storage_path"),
        ({"name": "run"}, "run_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_run_that_makes_no_sense(problems: Any, config: Any, field: str) -> None:
    problems(run_config=config).only(field)


def test_a_training_function_makes_its_checkpoints_itself(problems: Any) -> None:
    run = RunConfig(checkpoint_config=CheckpointConfig(checkpoint_frequency=5))
    problem = problems(function=lambda: None, run_config=run).only(
        "CheckpointConfig.checkpoint_frequency"
    )
    assert "polytrain.report(metrics, checkpoint=…)" in problem.remedy


def test_a_condition_finishes_no_run_without_a_checkpoint(problems: Any) -> None:
    """Where every rank writes a part, none is made at the step at which rank 0 meets it."""
    by_all = CheckpointConfig(written_by="every_rank")
    for condition in ({"stop": {"train-mse": 0.1}}, {"time_budget_s": 60}):
        run = RunConfig(checkpoint_config=by_all, **condition)
        problem = problems(run_config=run).only("CheckpointConfig.checkpoint_frequency")
        assert f"RunConfig.{next(iter(condition))} may finish the run" in problem.what
    assert make_trainer("reference", **GOOD, run_config=RunConfig(checkpoint_config=by_all))
    often = replace(by_all, checkpoint_frequency=2)
    config = RunConfig(stop={"train-mse": 0.1}, checkpoint_config=often)
    assert make_trainer("reference", **GOOD, run_config=config)


def test_everything_that_is_wrong_with_a_configuration_is_in_one_error(problems: Any) -> None:
    found = problems(
        function=lambda: None,
        scaling_config=ScalingConfig(num_workers="2", resources_per_worker={"cpu": 1}),
        run_config=RunConfig(
            name="..",
            observers=[object()],
            checkpoint_config=CheckpointConfig(checkpoint_frequency=5),
            failure_config=FailureConfig(max_failures=0.5),
        ),
        datasets={"train": "/no/such/file.parquet"},
    )
    assert set(found) == {
        "ScalingConfig.num_workers",
        "ScalingConfig.resources_per_worker",
        "RunConfig.name",
        "RunConfig.observers[0]",
        "CheckpointConfig.checkpoint_frequency",
        "FailureConfig.max_failures",
        "datasets['train']",
    }


def test_stragglers_can_be_replaced_where_somebody_stands_by(problems: Any) -> None:
    replaces = RunConfig(failure_config=FailureConfig(stragglers="replace"))
    problem = problems(run_config=replaces).only("FailureConfig.stragglers")
    assert "ScalingConfig(standby=1)" in problem.remedy
    problems(run_config=replaces, scaling_config=ScalingConfig(num_workers=-1, standby=1)).only(
        "ScalingConfig.num_workers"
    )


def trainer_in(storage: Path | str, name: str | None = None) -> Trainer:
    return make_trainer(
        "reference",
        label="label",
        datasets={"train": DATA},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=storage, name=name, progress=False),
    )


def test_storage_that_cannot_be_written_is_refused_before_anything_starts(
    problems: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a directory")
    found = problems.of(lambda: trainer_in(tmp_path / "file" / "runs").fit())
    problem = found.only("RunConfig.storage_path")
    assert str(tmp_path / "file") in problem.what
    assert (tmp_path / "file").read_text() == "not a directory"


def test_storage_that_workers_cannot_reach_is_refused(problems: Any) -> None:
    run = RunConfig(storage_path="memory://runs", progress=False)
    problem = problems(run_config=run).only("RunConfig.storage_path")
    assert "'memory://runs/" in problem.what
    assert "num_workers=0" in problem.remedy


def test_a_name_that_an_address_would_read_as_options_is_refused(problems: Any) -> None:
    run = RunConfig(name="lr?x=1", storage_path="memory://runs", progress=False)
    problem = problems(run_config=run).only("RunConfig.name")
    assert "'lr_x=1'" in problem.remedy


def test_a_password_in_an_address_is_refused_and_not_repeated(problems: Any) -> None:
    run = RunConfig(storage_path="s3://key:very-secret@bucket/runs", progress=False)
    problem = problems(run_config=run).only("RunConfig.storage_path")
    assert "password" in problem.what
    assert "very-secret" not in f"{problem}"


def test_an_address_of_no_known_kind_is_reported(
    problems: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = problems.of(lambda: trainer_in("nonsense://bucket/runs").fit())
    assert "nonsense" in found.only("RunConfig.storage_path").what
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_no_run_is_not_written_over(problems: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    problem = problems.of(lambda: trainer_in(tmp_path, "mine").fit()).only("RunConfig.name")
    assert "exists already" in problem.what
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["precious"]


def test_more_workers_than_the_cluster_can_hold_are_refused() -> None:
    scaling = ScalingConfig(num_workers=5, resources_per_worker={"CPU": 2})
    [problem] = cluster_problems(scaling, [{"CPU": 4.0}, {"CPU": 3.0}])
    assert problem.field == "ScalingConfig.num_workers"
    assert "5 is more" in problem.what
    assert problem.remedy == "Use num_workers=3"
    assert list(cluster_problems(scaling, [{"CPU": 10.0}])) == []


def test_an_autoscaler_may_bring_the_nodes_that_are_not_there_yet() -> None:
    scaling = ScalingConfig(num_workers=5, standby=1, placement_strategy="STRICT_SPREAD")
    alive = [{"CPU": 1.0}]
    assert list(cluster_problems(scaling, alive, {"CPU": 6.0})) == []
    [standby] = cluster_problems(scaling, alive, {"CPU": 5.0})
    assert standby.remedy == "Use standby=0"
    [workers] = cluster_problems(scaling, alive, {"CPU": 3.0})
    assert "5 is more than the cluster's autoscaler can add" in workers.what
    [device] = cluster_problems(ScalingConfig(num_workers=1, use_gpu=True), alive, {"CPU": 9.0})
    assert "1 CPU and 1 GPU" in device.what


@pytest.mark.parametrize(
    ("strategy", "remedy"), [("STRICT_SPREAD", "'SPREAD'"), ("STRICT_PACK", "'PACK'")]
)
def test_a_strategy_that_the_nodes_make_impossible_is_refused(strategy: str, remedy: str) -> None:
    scaling = ScalingConfig(num_workers=3, placement_strategy=strategy)  # type: ignore[arg-type]
    [problem] = cluster_problems(scaling, [{"CPU": 2.0}, {"CPU": 2.0}])
    assert problem.field == "ScalingConfig.placement_strategy"
    assert problem.what.startswith(f"{strategy} needs")
    assert remedy in problem.remedy
    assert list(cluster_problems(scaling, [{"CPU": 3.0}, {"CPU": 1.0}, {"CPU": 1.0}])) == []


def test_a_worker_that_no_node_can_hold_is_reported_to_ask_for_less() -> None:
    scaling = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 8})
    [problem] = cluster_problems(scaling, [{"CPU": 4.0}])
    assert problem.remedy == "Ask for less per worker"


def test_0_and_1_are_truth_values_where_these_belong() -> None:
    """Scripts have `use_gpu=int(args.use_gpu)`, or the number of GPUs of the machine."""
    assert ScalingConfig(use_gpu=0) == ScalingConfig(use_gpu=False)
    assert repr(ScalingConfig(use_gpu=1)) == repr(ScalingConfig(use_gpu=True))
    assert not list(field_problems(ScalingConfig(use_gpu=int(False))))
    assert ScalingConfig(num_workers=1).num_workers == 1
