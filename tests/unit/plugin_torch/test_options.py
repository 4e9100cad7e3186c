"""torch's driver half: options of the process group, and what trainers need."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from polytrain_plugins import Job
from polytrain_torch import Torch

JOB = Job(num_workers=2, use_gpu=False, cpus_per_worker=1, has_training_function=True, datasets={})


def test_usual_options_have_no_problem() -> None:
    assert list(Torch().problems(JOB)) == []
    assert list(Torch(process_group="gloo", timeout_s=5).problems(JOB)) == []
    assert list(Torch(process_group="nccl").problems(replace(JOB, use_gpu=True))) == []


@pytest.mark.parametrize("timeout", [0, -1.5, float("inf"), float("nan"), "10", True])
def test_a_timeout_is_a_time(timeout: float) -> None:
    [problem] = Torch(timeout_s=timeout).problems(JOB)
    assert problem.field == "timeout_s"
    assert str(timeout) in problem.what


def test_nccl_needs_gpus() -> None:
    [problem] = Torch(process_group="nccl").problems(JOB)
    assert problem.field == "process_group"
    assert "use_gpu=True" in problem.remedy
    assert "gloo" in problem.remedy


@pytest.mark.parametrize(
    ("given", "meant"),
    [("ncll", "nccl"), ("NCCL", "nccl"), ("glo", "gloo"), ("cpu:gloo,cuda:ncl", "nccl")],
)
def test_a_misspelt_process_group(given: str, meant: str) -> None:
    [problem] = Torch(process_group=given).problems(replace(JOB, use_gpu=True))
    assert problem.field == "process_group"
    assert repr(meant) in problem.remedy


@pytest.mark.parametrize("given", ["cpu:gloo,cuda:nccl", "hccl", "smddp", "mpi"])
def test_process_groups_of_other_packages(given: str) -> None:
    assert list(Torch(process_group=given).problems(replace(JOB, use_gpu=True))) == []


def test_a_process_group_has_a_name() -> None:
    [problem] = Torch(process_group=5).problems(JOB)  # type: ignore[arg-type]  # as a user may
    assert problem.field == "process_group"


def test_the_zygote_asks_for_gpus_without_touching_the_driver() -> None:
    """A process forked after CUDA was initialised could not use it."""
    assert Torch().demand(JOB).environment["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_it_travels() -> None:
    options = Torch(process_group="gloo", timeout_s=5)
    assert pickle.loads(pickle.dumps(options)) == options
