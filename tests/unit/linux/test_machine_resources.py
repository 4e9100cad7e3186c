"""What this machine has for workers, as its control group limits it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from polytrain.linux.machine_resources import ControlGroups, machine_resources
from polytrain_plugins import InvalidJobError

AVAILABLE = len(os.sched_getaffinity(0))


def group(directory: Path, **files: str) -> ControlGroups:
    for name, content in files.items():
        path = directory / name.replace("__", "/").replace("_of_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return ControlGroups(mounts=directory, membership=directory / "none")


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, AVAILABLE),
        ({"cpu_of_max": "max 100000"}, AVAILABLE),
        ({"cpu_of_max": "100000 100000"}, 1),
        ({"cpu_of_max": "50000 100000"}, 1),
        ({"cpu_of_max": "6400000 100000"}, AVAILABLE),
        ({"cpu__cpu_of_cfs_quota_us": "-1", "cpu__cpu_of_cfs_period_us": "100000"}, AVAILABLE),
        ({"cpu__cpu_of_cfs_quota_us": "100000", "cpu__cpu_of_cfs_period_us": "100000"}, 1),
    ],
)
def test_cpus(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    assert machine_resources({}, group(tmp_path, **files))["CPU"] == cpus


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory_of_max": "max"}, None),
        ({"memory_of_max": "1000000"}, 1_000_000),
        ({"memory__memory_of_limit_in_bytes": "2000000"}, 2_000_000),
        ({"memory__memory_of_limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_memory(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    total = psutil.virtual_memory().total
    assert machine_resources({}, group(tmp_path, **files))["memory"] == (limit or total)


def test_the_user_may_say_how_many_cpus_workers_share(tmp_path: Path) -> None:
    assert machine_resources({"POLYTRAIN_LOCAL_CPUS": "64"}, group(tmp_path))["CPU"] == 64


@pytest.mark.parametrize("given", ["many", "0", "-2", "nan", "inf"])
def test_a_number_of_cpus_that_is_none(tmp_path: Path, given: str) -> None:
    with pytest.raises(InvalidJobError, match=f"POLYTRAIN_LOCAL_CPUS: it is '{given}'"):
        machine_resources({"POLYTRAIN_LOCAL_CPUS": given}, group(tmp_path))
