"""This machine's resources for workers, within the limits of control groups.

A container, a batch job or a service has such limits. The kernel's figures for the whole machine,
such as its free memory, ignore them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath

from polytrain_plugins import InvalidJobError, Problem

_NO_LIMIT = 1 << 60
"""Bytes above which a limit of version 1 means no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroups:
    """Control groups of version 1 or 2. A group is also bound by the limits of those above it."""

    mounts: Path = Path("/sys/fs/cgroup")
    """Mount point of the groups. In a container the root is the container's own group."""

    membership: Path = Path("/proc/self/cgroup")
    """File that names this process's groups."""

    def cpus(self) -> float | None:
        """Return the CPUs that this process may use on average; None without a limit."""
        limits = []
        for group in self._groups("cpu"):
            limit, _, period = _read(group / "cpu.max").partition(" ")
            if not limit:
                limit = _read(group / "cpu.cfs_quota_us")
                period = _read(group / "cpu.cfs_period_us")
            if limit.isdigit() and period.isdigit():
                limits.append(int(limit) / int(period))
        return min(limits, default=None)

    def memory(self) -> int | None:
        """Return the bytes of memory that this process's groups may use; None without a limit."""
        return min((limit for _, limit in self._memory_limits()), default=None)

    def free_memory(self) -> int | None:
        """Return the bytes of that limit that aren't in use; None without a limit."""
        free = (limit - _used_memory(group) for group, limit in self._memory_limits())
        return max(0, least) if (least := min(free, default=None)) is not None else None

    def oom_kills(self) -> int | None:
        """Return how many processes of this process's group were killed for want of memory.

        None if the kernel doesn't count them: nor does it for the root of version 2.
        """
        top, controller, *own = self._groups("memory")
        for group in (*own, controller, top):
            for name in ("memory.events", "memory.oom_control"):
                for line in _read(group / name).splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return None

    def _memory_limits(self) -> Iterator[tuple[Path, int]]:
        for group in self._groups("memory"):
            # Beyond memory.high, processes are slowed down until they hardly run.
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
                limit = _read(group / name)
                if limit.isdigit() and int(limit) < _NO_LIMIT:
                    yield group, int(limit)

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the directories of this process's groups; some may not exist here."""
        yield self.mounts
        yield self.mounts / controller
        for line in _read(self.membership).splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = self.mounts / controller if controllers else self.mounts
            path = PurePosixPath(name.lstrip("/"))
            # The path of a group outside the container's namespace begins with two dots.
            if ".." not in path.parts:
                yield from (top / each for each in (path, *path.parents[:-1]))


OWN_GROUPS = ControlGroups()


def available_memory(groups: ControlGroups = OWN_GROUPS) -> int:
    """Return the bytes that this process can allocate now without swapping.

    It is the machine's free memory, or the rest of a control group's limit if that is less.
    """
    # Import it late: that takes a while, and a driver without data doesn't need it.
    import psutil

    machine: int = psutil.virtual_memory().available
    free = groups.free_memory()
    return machine if free is None else min(machine, free)


def _used_memory(group: Path) -> int:
    """Return the bytes in use, without droppable page cache."""
    used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
    fields = [line.split() for line in _read(group / "memory.stat").splitlines()]
    counts = {name: int(count) for name, count in fields}
    # In version 1 only the total includes child groups.
    cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
    return int(used or 0) - cached


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="surrogateescape").strip()
    except OSError:
        return ""


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
