"""Ray on several hosts: one cluster, with a node in each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polytrain.testing.hosts import Host, ray_on

_DRIVER = """
import ray, socket
ray.init()

@ray.remote(num_cpus=2)
def place():
    return socket.gethostname()

print(ray.cluster_resources()["CPU"], sorted(ray.get([place.remote() for _ in range(2)])))
"""


@pytest.mark.only_in_sweep
def test_tasks_of_a_driver_in_any_host_run_on_all(two: tuple[Host, ...], tmp_path: Path) -> None:
    a, b = two
    address = ray_on(a, b, cpus=2)
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    done = b.run([sys.executable, script], env={"RAY_ADDRESS": address})
    assert done.stdout == "4.0 ['a', 'b']\n"
