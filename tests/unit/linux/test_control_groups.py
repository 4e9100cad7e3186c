"""Limits of containers, batch jobs and services, of both versions of control groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from polytrain.linux.machine_resources import ControlGroups, available_memory

MB = 1 << 20
NO_LIMIT = str(2**63 - 4096)
"""Of memory, in version 1."""


def groups(directory: Path, membership: str, files: Mapping[str, str]) -> ControlGroups:
    """Control groups as the kernel shows them, in a directory."""
    for name, content in files.items():
        path = directory / "mounts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    own = directory / "membership"
    own.write_text(membership)
    return ControlGroups(mounts=directory / "mounts", membership=own)


MEMORY = {
    "no groups": ("", {}, None, None),
    "version 2, no limit": ("0::/\n", {"memory.max": "max", "memory.current": "5"}, None, None),
    "version 2, in a container": (
        "0::/\n",
        {
            "memory.max": str(100 * MB),
            "memory.high": "max",
            "memory.current": str(70 * MB),
            "memory.stat": f"anon {20 * MB}\ninactive_file {30 * MB}\nactive_file {20 * MB}",
        },
        100 * MB,
        60 * MB,
    ),
    "version 2, throttled before the limit": (
        "0::/\n",
        {
            "memory.max": str(100 * MB),
            "memory.high": str(80 * MB),
            "memory.current": str(70 * MB),
            "memory.stat": "inactive_file 0",
        },
        80 * MB,
        10 * MB,
    ),
    "version 2, a job with steps": (
        "0::/system.slice/job_7/step_0/user\n",
        {
            "system.slice/memory.max": "max",
            "system.slice/job_7/memory.max": str(64 * MB),
            "system.slice/job_7/memory.current": str(60 * MB),
            "system.slice/job_7/step_0/memory.max": str(80 * MB),
            "system.slice/job_7/step_0/memory.current": str(10 * MB),
            "system.slice/job_7/step_0/user/memory.max": "max",
            "system.slice/job_8/memory.max": "1",
        },
        64 * MB,
        4 * MB,
    ),
    "version 1, no limit": (
        "4:memory:/\n",
        {"memory/memory.limit_in_bytes": NO_LIMIT, "memory/memory.usage_in_bytes": "5"},
        None,
        None,
    ),
    "version 1, in a container that shows its own group alone": (
        "4:memory:/docker/0f3a\n3:cpu,cpuacct:/docker/0f3a\n0::/docker/0f3a\n",
        {
            "memory/memory.limit_in_bytes": str(50 * MB),
            "memory/memory.usage_in_bytes": str(45 * MB),
            "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {15 * MB}",
        },
        50 * MB,
        20 * MB,
    ),
    "version 1, a service of the machine": (
        "9:cpu,cpuacct:/\n4:memory:/services/train\n1:name=systemd:/services/train\n",
        {
            "memory/memory.limit_in_bytes": NO_LIMIT,
            "memory/memory.usage_in_bytes": str(900 * MB),
            "memory/services/memory.limit_in_bytes": NO_LIMIT,
            "memory/services/train/memory.limit_in_bytes": str(32 * MB),
            "memory/services/train/memory.usage_in_bytes": str(31 * MB),
            "memory/services/train/memory.stat": "total_inactive_file 0",
        },
        32 * MB,
        1 * MB,
    ),
    "outside of the namespace": (
        "0::/../../other\n",
        {"memory.max": str(9 * MB), "memory.current": str(10 * MB)},
        9 * MB,
        0,
    ),
}
"""What /proc/self/cgroup says, files of the groups, the limit, and what is free below it."""


@pytest.mark.parametrize(("membership", "files", "limit", "free"), MEMORY.values(), ids=MEMORY)
def test_memory(
    tmp_path: Path, membership: str, files: Mapping[str, str], limit: int | None, free: int | None
) -> None:
    found = groups(tmp_path, membership, files)
    assert (found.memory(), found.free_memory()) == (limit, free)


OOM_KILLS = {
    "no groups": ("", {}, None),
    "version 2, on no limited machine": ("0::/\n", {}, None),
    "version 2": (
        "0::/user.slice/session\n",
        {
            "user.slice/memory.events": "low 0\noom 9\noom_kill 9\noom_group_kill 0",
            "user.slice/session/memory.events": "low 0\noom 4\noom_kill 3\noom_group_kill 0",
        },
        3,
    ),
    "version 2, where only a group above has the controller": (
        "0::/user.slice/session\n",
        {"user.slice/memory.events": "oom_kill 9", "user.slice/session/cpu.max": "max 1"},
        9,
    ),
    "version 1": (
        "9:cpu,cpuacct:/job\n4:memory:/job/step\n0::/\n",
        {
            "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 8",
            "memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7",
            "memory/job/step/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
        },
        2,
    ),
    "version 1, in a container that shows its own group alone": (
        "4:memory:/docker/0f3a\n0::/docker/0f3a\n",
        {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5"},
        5,
    ),
    "version 1, of a kernel without such a count": (
        "4:memory:/\n",
        {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0"},
        None,
    ),
}


@pytest.mark.parametrize(("membership", "files", "kills"), OOM_KILLS.values(), ids=OOM_KILLS)
def test_processes_that_were_killed_for_want_of_memory(
    tmp_path: Path, membership: str, files: Mapping[str, str], kills: int | None
) -> None:
    assert groups(tmp_path, membership, files).oom_kills() == kills


CPUS = {
    "no groups": ("", {}, None),
    "version 2, no limit": ("0::/\n", {"cpu.max": "max 100000"}, None),
    "version 2": ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
    "version 2, limited above": (
        "0::/job/step\n",
        {"job/cpu.max": "200000 100000", "job/step/cpu.max": "800000 100000"},
        2.0,
    ),
    "version 1, no limit": (
        "3:cpu,cpuacct:/\n",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        None,
    ),
    "version 1": (
        "3:cpu,cpuacct:/a\n",
        {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"},
        0.5,
    ),
}


@pytest.mark.parametrize(("membership", "files", "cpus"), CPUS.values(), ids=CPUS)
def test_cpus(
    tmp_path: Path, membership: str, files: Mapping[str, str], cpus: float | None
) -> None:
    assert groups(tmp_path, membership, files).cpus() == cpus


@pytest.mark.parametrize("limit", [20 * MB, 1 << 59])
def test_available_memory_is_the_least_of_machine_and_group(tmp_path: Path, limit: int) -> None:
    files = {"memory.max": str(limit), "memory.current": str(12 * MB)}
    available = available_memory(groups(tmp_path, "0::/\n", files))
    if limit == 20 * MB:
        assert available == 8 * MB
    else:
        assert 0 < available <= psutil.virtual_memory().total
