"""Finds the clusters that a run can use, without importing Ray."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from polytrain.config.configs import ScalingConfig
from polytrain.config.mix import Mix
from polytrain.config.run_spec import RunSpec
from polytrain.config.runtime_env import parts_of_ray
from polytrain.config.validation_config import options_of_ray
from polytrain.linux.machine_resources import has_gpu_device, machine_resources
from polytrain.policy.scaling import AvailableClusters, ClusterChoice
from polytrain.ray_api import is_ray_dataset
from polytrain.workers.driver.group import AgentCluster
from polytrain.workers.driver.local_cluster import LocalCluster
from polytrain.workers.ray.connection import cluster_address


def available_clusters(spec: RunSpec) -> AvailableClusters:
    """Return the clusters that the run's workers could use now."""
    datasets, validation = spec.datasets, spec.validation_config
    names = datasets if isinstance(datasets, Mapping) else {}
    function = getattr(spec.train_loop_per_worker, "__code__", None)
    return AvailableClusters(
        machine=machine_resources(os.environ),
        ray_is_initialized=ray_is_initialized(),
        ray_address=cluster_address(os.environ),
        ray_address_is_named=os.environ.get("RAY_ADDRESS", "") not in ("", "auto"),
        ray_datasets=tuple(str(name) for name, data in names.items() if _is_on_ray(data)),
        function_uses_ray=_names_ray(function),
        validation_uses_ray=_names_ray(getattr(validation and validation.fn, "__code__", None)),
        validation_options=() if validation is None else options_of_ray(validation),
        runtime_env=parts_of_ray(spec.run_config.worker_runtime_env),
        has_gpu_device=has_gpu_device(),
    )


def _is_on_ray(data: Any) -> bool:
    is_mix = isinstance(data, Mix) and isinstance(data.sources, Mapping)
    return any(map(is_ray_dataset, data.sources.values() if is_mix else [data]))


def ray_is_initialized() -> bool:
    """Return whether this process is connected to Ray."""
    # Ray may lack the attribute: another thread may be importing it now.
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def ray_client_address() -> str:
    """Return the Ray Client address that this process uses, or would use; empty if none."""
    if ray_is_initialized():
        client = sys.modules["ray"].util.client.ray
        return "ray://" if client.is_connected() else ""
    address = os.environ.get("RAY_ADDRESS", "")
    return address if address.startswith("ray://") else ""


@contextlib.contextmanager
def opened_cluster(choice: ClusterChoice, scaling: ScalingConfig) -> Iterator[AgentCluster]:
    """Open the chosen cluster. If this starts Ray, it also shuts it down.

    Args:
        scaling: the user's configuration.

    Raises:
        InvalidJobError: `RAY_ADDRESS` names a cluster that doesn't answer.
    """
    if choice.is_local:
        yield LocalCluster()
        return
    # Import it late: importing Ray takes a while.
    from polytrain.workers.ray.cluster import RayCluster
    from polytrain.workers.ray.connection import running_ray

    with running_ray():
        yield RayCluster(scaling.label_selectors)


def _names_ray(code: CodeType | None) -> bool:
    """Return whether code, or a function within it, uses or imports the name `ray`."""
    if code is None:
        return False
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    named = any(name.partition(".")[0] == "ray" for name in code.co_names)
    return named or any(_names_ray(function) for function in inner)
