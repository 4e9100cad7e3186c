"""This machine's resources for workers, within the limits of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from polytrain.linux.control_groups import OWN_GROUPS, ControlGroups
from polytrain_plugins import InvalidJobError, Problem

_CPUS = "POLYTRAIN_LOCAL_CPUS"
_NVIDIA_DEVICES = "nvidia[0-9]*"
_BY_ID = ("GPU-", "MIG-")
"""Prefixes of identifiers of GPUs, or parts of GPUs, that aren't numbers."""

_GPU_DEVICES = (_NVIDIA_DEVICES, "kfd", "dxg", "dri/renderD*")
"""Device files of NVIDIA's and AMD's drivers, of WSL, and of all other drivers."""


def machine_resources(
    environment: Mapping[str, str], groups: ControlGroups = OWN_GROUPS
) -> dict[str, float]:
    """Return the CPUs, bytes of memory and GPUs that this process may use, by Ray's names.

    Args:
        environment: this process's variables. POLYTRAIN_LOCAL_CPUS overrides the number of CPUs.
        groups: the control groups that limit this process.

    Raises:
        InvalidJobError: POLYTRAIN_LOCAL_CPUS isn't a number above 0.
    """
    return {
        "CPU": _given_cpus(environment) or float(_cpus(groups)),
        "memory": float(_memory(groups)),
        "GPU": float(len(visible_gpus(environment))),
    }


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the NVIDIA GPUs that CUDA shows this process, as CUDA_VISIBLE_DEVICES names them.

    This counts device files: calling CUDA would create a context. Like CUDA, it ignores all entries
    after a number that no GPU has.

    Args:
        environment: this process's variables.
        devices: directory of the device files.
    """
    every = [str(number) for number in range(len(list(devices.glob(_NVIDIA_DEVICES))))]
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None or not every:
        return tuple(every)
    named = [name.strip() for name in given.split(",")]
    return tuple(takewhile(lambda name: name in every or name.startswith(_BY_ID), named))


def has_gpu_device(devices: Path = Path("/dev")) -> bool:
    """Return whether there is a device file of a GPU. Opens none."""
    return any(any(devices.glob(pattern)) for pattern in _GPU_DEVICES)


def _given_cpus(environment: Mapping[str, str]) -> float | None:
    given = environment.get(_CPUS)
    if not given:
        return None
    try:
        cpus = float(given)
    except ValueError:
        cpus = math.nan
    if not (math.isfinite(cpus) and cpus > 0):
        problem = Problem(
            field=_CPUS,
            what=f"it is {given!r}, which isn't a number of CPUs",
            remedy="Set it to a number above 0, or unset it",
        )
        raise InvalidJobError((problem,))
    return cpus


def _cpus(groups: ControlGroups) -> int:
    available = len(os.sched_getaffinity(0))
    quota = groups.cpus()
    return available if quota is None else max(1, min(available, math.floor(quota)))


def _memory(groups: ControlGroups) -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = groups.memory()
    return total if limit is None else min(total, limit)
