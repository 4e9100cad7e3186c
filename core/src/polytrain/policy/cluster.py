"""Chooses where a run's agents run: in the driver on this machine, or on a Ray cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from polytrain.config.configs import ScalingConfig
from polytrain.policy.scaling import worker_capacity
from polytrain.text.first_few import numbered
from polytrain_plugins import Problem

_OF_ONE_MACHINE = frozenset({"CPU", "memory", "GPU"})
"""Resources that a run can assign without Ray; GPUs only if they are NVIDIA's and whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableClusters:
    """The clusters that a run could use; found without starting anything."""

    machine: Mapping[str, float]
    ray_is_initialized: bool
    ray_address: str | None
    """Address of the cluster that was configured or found; None if there is none."""

    ray_datasets: tuple[str, ...]
    function_uses_ray: bool
    validation_uses_ray: bool = False
    validation_options: tuple[str, ...] = ()
    """Options of validations that have no effect without Ray."""

    has_gpu_device: bool
    runtime_env: tuple[str, ...] = ()
    """Parts of `RunConfig.worker_runtime_env` that only Ray sets up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice:
    """The chosen cluster, and the reason."""

    is_local: bool
    reason: str

    def __str__(self) -> str:
        return f"{'on this machine' if self.is_local else 'on Ray'}: {self.reason}"


def choose_cluster(scaling: ScalingConfig, around: AvailableClusters) -> ClusterChoice:
    """Choose this machine if nothing needs Ray, unless the user chooses.

    Args:
        scaling: the user's configuration. `local_problems` checks whether "local" is possible.
    """
    if scaling.cluster != "auto":
        reason = f"cluster={scaling.cluster!r}"
        return ClusterChoice(is_local=scaling.cluster == "local", reason=reason)
    needs_ray = next(_reasons_for_ray(scaling, around), None)
    return ClusterChoice(is_local=needs_ray is None, reason=needs_ray or "nothing needs a cluster")


def local_problems(scaling: ScalingConfig, around: AvailableClusters) -> Iterator[Problem]:
    """Yield problems that keep the workers from running on this machine without Ray."""
    for name in around.ray_datasets:
        yield Problem(
            field=f"datasets[{name!r}]",
            what="it is a Ray data set, which ScalingConfig(cluster='local') can't read",
            remedy="Pass files or a table, or leave cluster out to use Ray",
        )
    if around.runtime_env:
        yield Problem(
            field="RunConfig.worker_runtime_env",
            what=f"{', '.join(map(repr, around.runtime_env))}: only Ray sets this up, and "
            "cluster='local' doesn't use it",
            remedy="Leave cluster out, or install what is needed on this machine",
        )
    if scaling.placement_strategy == "STRICT_SPREAD" and scaling.min_workers > 1:
        yield Problem(
            field="ScalingConfig.placement_strategy",
            what="STRICT_SPREAD needs a node for every worker, and cluster='local' is one node",
            remedy="Leave one of the two out",
        )
    if scaling.label_selector:
        yield Problem(
            field="ScalingConfig.label_selector",
            what="only Ray's nodes have labels, and cluster='local' doesn't use Ray",
            remedy="Leave one of the two out",
        )
    if around.validation_options:
        yield Problem(
            field="ValidationConfig.ray_remote_kwargs",
            what=f"{', '.join(around.validation_options)}: cluster='local' gives a validation "
            "CPUs only",
            remedy="Leave cluster out, or set it to 'ray': Ray gives a validation what it asks for",
        )
    others = _only_of_ray(scaling, around)
    if others:
        yield Problem(
            field="ScalingConfig.resources_per_worker",
            what=f"{', '.join(others)}: cluster='local' gives workers only CPUs, memory and whole "
            f"NVIDIA GPUs, of which this machine has {around.machine.get('GPU', 0):g}",
            remedy="Leave cluster out, or set it to 'ray': Ray assigns every other resource",
        )
        return
    least = scaling.min_workers + scaling.standby
    capacity = worker_capacity([around.machine], scaling.resources)
    if least > capacity.workers:
        yield Problem(
            field="ScalingConfig.num_workers",
            what=f"{numbered(least, 'worker')} {'is' if least == 1 else 'are'} more than this "
            f"machine can hold ({_has(scaling, around)})",
            remedy=f"Use num_workers={max(1, capacity.workers - scaling.standby)}, "
            f"{_share_cpus(scaling, around)}or use a Ray cluster: set RAY_ADDRESS, or call "
            "ray.init()",
        )


def new_ray_problems(scaling: ScalingConfig, around: AvailableClusters) -> Iterator[Problem]:
    """Yield the workers' demands that a Ray cluster of only this machine can't meet."""
    is_new = not around.ray_is_initialized and around.ray_address is None
    if is_new and scaling.resources.get("GPU", 0) > 0 and not around.has_gpu_device:
        without = "Use use_gpu=False" if scaling.use_gpu else "Leave 'GPU' out of it"
        yield Problem(
            field=f"ScalingConfig.{'use_gpu' if scaling.use_gpu else 'resources_per_worker'}",
            what="this machine has no GPU, and there is no Ray cluster",
            remedy=f"{without}, or use a Ray cluster with GPUs: set RAY_ADDRESS, or call "
            "ray.init()",
        )


def _reasons_for_ray(scaling: ScalingConfig, around: AvailableClusters) -> Iterator[str]:
    if around.ray_is_initialized:
        yield "Ray is initialised"
    if around.ray_address is not None:
        yield f"there is a cluster at {around.ray_address}"
    if around.ray_datasets:
        yield f"{around.ray_datasets[0]!r} is a Ray data set"
    if around.runtime_env:
        yield f"worker_runtime_env has {around.runtime_env[0]!r}, which only Ray sets up"
    if around.function_uses_ray:
        yield "the training function uses Ray"
    if scaling.placement_strategy == "STRICT_SPREAD" and scaling.min_workers > 1:
        yield "STRICT_SPREAD needs several nodes"
    if scaling.label_selector:
        yield "label_selector chooses among Ray's nodes"
    if around.validation_uses_ray:
        yield "the validation function uses Ray"
    if around.validation_options:
        yield f"validations request {around.validation_options[0]}, which only Ray assigns"
    others = _only_of_ray(scaling, around)
    if others:
        yield f"workers request {others[0]}, which only Ray assigns"


def _only_of_ray(scaling: ScalingConfig, around: AvailableClusters) -> list[str]:
    wanted = (name for name, amount in scaling.resources.items() if amount > 0)
    others = set(wanted) - _OF_ONE_MACHINE
    gpus = scaling.resources.get("GPU", 0)
    if gpus % 1 or (gpus and not around.machine.get("GPU")):
        # Only Ray can share a GPU, or find one that isn't NVIDIA's.
        others.add("GPU")
    return sorted(others)


def _share_cpus(scaling: ScalingConfig, around: AvailableClusters) -> str:
    """Return advice if CPUs are missing."""
    needed = scaling.resources.get("CPU", 0) * (scaling.min_workers + scaling.standby)
    if needed <= around.machine.get("CPU", 0):
        return ""
    return "set POLYTRAIN_LOCAL_CPUS to let workers share CPUs, "


def _has(scaling: ScalingConfig, around: AvailableClusters) -> str:
    names = (name for name, amount in scaling.resources.items() if amount > 0)
    return ", ".join(f"{around.machine.get(name, 0):g} {name}" for name in names)
