"""Where a run's workers are: on this machine, unless something needs Ray."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from polytrain import ScalingConfig
from polytrain.policy.scaling import (
    AvailableClusters,
    choose_cluster,
    local_problems,
    new_ray_problems,
)

ALONE = AvailableClusters(
    machine={"CPU": 4.0, "memory": 8e9},
    ray_is_initialized=False,
    ray_address=None,
    ray_datasets=(),
    function_uses_ray=False,
    has_gpu_device=False,
)

WITH_GPUS = replace(ALONE, machine={**ALONE.machine, "GPU": 2.0}, has_gpu_device=True)


def scaling(**options: Any) -> ScalingConfig:
    return ScalingConfig(**{"num_workers": 2, **options})


def test_nothing_needs_ray() -> None:
    assert str(choose_cluster(scaling(), ALONE)) == "on this machine: nothing needs a cluster"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ray_is_initialized": True}, "on Ray: Ray is initialised"),
        (
            {"ray_address": "10.0.0.1:6379", "ray_address_is_named": True},
            "on Ray: RAY_ADDRESS names the cluster at 10.0.0.1:6379",
        ),
        (
            {"ray_address": "10.0.0.1:6379"},
            "on Ray: this machine's newest cluster, at 10.0.0.1:6379, which ray.init() would join "
            "too; RAY_ADDRESS=local leaves it alone, and RAY_ADDRESS=HOST:PORT names another",
        ),
        ({"ray_datasets": ("train",)}, "on Ray: 'train' is a Ray data set"),
        ({"function_uses_ray": True}, "on Ray: the training function uses Ray"),
        ({"runtime_env": ("pip",)}, "on Ray: worker_runtime_env has 'pip', which only Ray sets up"),
    ],
)
def test_ray_is_used_where_it_is_there_or_needed(change: dict[str, Any], reason: str) -> None:
    around = replace(ALONE, **change)
    assert str(choose_cluster(scaling(), around)) == reason
    assert choose_cluster(scaling(cluster="local"), around).is_local


def test_who_asks_for_ray_is_told_which_cluster_is_joined() -> None:
    around = replace(ALONE, ray_address="10.0.0.1:6379", ray_address_is_named=True)
    choice = choose_cluster(scaling(cluster="ray"), around)
    assert str(choice) == "on Ray: cluster='ray'; RAY_ADDRESS names the cluster at 10.0.0.1:6379"
    assert str(choose_cluster(scaling(cluster="ray"), ALONE)) == "on Ray: cluster='ray'"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_gpu": True}, "workers request GPU, which only Ray assigns"),
        ({"resources_per_worker": {"TPU": 1}}, "workers request TPU, which only Ray assigns"),
        ({"placement_strategy": "STRICT_SPREAD"}, "STRICT_SPREAD needs several nodes"),
    ],
)
def test_what_one_machine_cannot_give_is_asked_of_ray(options: dict[str, Any], reason: str) -> None:
    choice = choose_cluster(scaling(**options), ALONE)
    assert not choice.is_local
    assert choice.reason == reason


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": (2, 8)},
        {"num_workers": 4, "placement_strategy": "STRICT_PACK"},
        {"num_workers": 8, "resources_per_worker": {"CPU": 0.5}},
        {"num_workers": 1, "placement_strategy": "STRICT_SPREAD"},
        {"resources_per_worker": {"GPU": 0}},
    ],
)
def test_what_one_machine_can_give_needs_no_ray(options: dict[str, Any]) -> None:
    assert choose_cluster(scaling(**options), ALONE).is_local
    assert list(local_problems(scaling(cluster="local", **options), ALONE)) == []


@pytest.mark.parametrize("options", [{"use_gpu": True}, {"resources_per_worker": {"GPU": 1}}])
def test_whole_gpus_of_this_machine_need_no_ray(options: dict[str, Any]) -> None:
    assert choose_cluster(scaling(**options), WITH_GPUS).is_local
    assert list(local_problems(scaling(cluster="local", **options), WITH_GPUS)) == []


def test_parts_of_a_gpu_need_ray() -> None:
    halves = {"resources_per_worker": {"GPU": 0.5}}
    choice = choose_cluster(scaling(**halves), WITH_GPUS)
    assert choice.reason == "workers request GPU, which only Ray assigns"
    [problem] = local_problems(scaling(cluster="local", **halves), WITH_GPUS)
    assert "whole NVIDIA GPUs, of which this machine has 2" in problem.what


def test_more_gpus_than_the_machine_has() -> None:
    """More shares of its CPUs wouldn't help."""
    wanted = scaling(num_workers=4, use_gpu=True)
    assert choose_cluster(wanted, WITH_GPUS).is_local
    [problem] = local_problems(wanted, WITH_GPUS)
    assert problem.what == "4 workers are more than this machine can hold (4 CPU, 2 GPU)"
    assert problem.remedy.startswith("Use num_workers=2, or use a Ray cluster")


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"num_workers": 5}, {"num_workers": 4}),
        ({"num_workers": 4, "standby": 1}, {"num_workers": 3}),
        ({"num_workers": 1, "standby": 4}, {"standby": 3}),
        ({"num_workers": 9, "standby": 4}, {"num_workers": 1, "standby": 3}),
    ],
)
def test_the_remedy_is_what_the_machine_holds(
    options: dict[str, Any], change: dict[str, Any]
) -> None:
    [problem] = local_problems(scaling(**options), ALONE)
    fields = " and ".join(f"{name}={value}" for name, value in change.items())
    assert problem.remedy.startswith(f"Use {fields}, set POLYTRAIN_LOCAL_CPUS")
    assert list(local_problems(scaling(**{**options, **change}), ALONE)) == []


def test_a_machine_that_is_too_small_for_one_worker() -> None:
    """Fewer workers wouldn't help."""
    wanted = scaling(num_workers=1, resources_per_worker={"CPU": 16, "memory": 16 * 2**30})
    [problem] = local_problems(wanted, ALONE)
    assert problem.what.endswith("than this machine can hold (4 CPU, 7.5 GiB of memory)")
    assert problem.remedy.startswith("Lower resources_per_worker, set POLYTRAIN_LOCAL_CPUS")


def test_ray_is_used_where_it_is_asked_for() -> None:
    assert str(choose_cluster(scaling(cluster="ray"), ALONE)) == "on Ray: cluster='ray'"


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 5},
        {"num_workers": 4, "standby": 1},
        {"resources_per_worker": {"memory": 5e9}},
    ],
)
@pytest.mark.parametrize("cluster", ["auto", "local"])
def test_more_than_the_machine_holds_is_refused(options: dict[str, Any], cluster: str) -> None:
    """Whether or not it was asked for: a Ray that is started here would have no more."""
    wanted = scaling(cluster=cluster, **options)
    assert choose_cluster(wanted, ALONE).is_local
    [problem] = local_problems(wanted, ALONE)
    assert problem.field == "ScalingConfig.num_workers"
    assert "RAY_ADDRESS" in problem.remedy


@pytest.mark.parametrize(
    ("options", "change", "field", "says"),
    [
        ({"num_workers": 5}, {}, "ScalingConfig.num_workers", "5 workers are more than .*4 CPU"),
        ({"use_gpu": True}, {}, "ScalingConfig.resources_per_worker", "GPU: cluster='local'"),
        (
            {"placement_strategy": "STRICT_SPREAD"},
            {},
            "ScalingConfig.placement_strategy",
            "a node for every worker",
        ),
        ({}, {"ray_datasets": ("train",)}, "datasets['train']", "it is a Ray data set"),
    ],
)
def test_local_is_refused_where_it_cannot_be(
    options: dict[str, Any], change: dict[str, Any], field: str, says: str
) -> None:
    [problem] = local_problems(scaling(cluster="local", **options), replace(ALONE, **change))
    assert problem.field == field
    assert re.search(says, problem.what)
    assert problem.remedy


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"use_gpu": True}, "ScalingConfig.use_gpu"),
        ({"resources_per_worker": {"GPU": 1}}, "ScalingConfig.resources_per_worker"),
    ],
)
def test_a_gpu_where_there_is_none(options: dict[str, Any], field: str) -> None:
    [problem] = new_ray_problems(scaling(**options), ALONE)
    assert problem.field == field
    assert problem.what == "this machine has no GPU, and there is no Ray cluster"


@pytest.mark.parametrize(
    "change",
    [{"has_gpu_device": True}, {"ray_is_initialized": True}, {"ray_address": "10.0.0.1:6379"}],
)
def test_a_gpu_that_may_be_there(change: dict[str, Any]) -> None:
    assert list(new_ray_problems(scaling(use_gpu=True), replace(ALONE, **change))) == []
    assert list(new_ray_problems(scaling(), ALONE)) == []
