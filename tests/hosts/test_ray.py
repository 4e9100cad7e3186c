"""Ray on several hosts: one cluster, with a node in each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from polytrain.testing.hosts import Host, ray_on

_DRIVER = """
import json, ray, socket, time
ray.init()

@ray.remote(num_cpus=2)
def place():
    time.sleep(0.1)
    return socket.gethostname(), time.time()

print(json.dumps([ray.cluster_resources()["CPU"], ray.get([place.remote() for _ in range(2)])]))
"""


@pytest.mark.only_in_sweep
def test_tasks_of_a_driver_in_any_host_run_on_all(two: tuple[Host, ...], tmp_path: Path) -> None:
    """Also on a host whose clock is wrong."""
    a, b = two
    b.clock(+3600)
    address = ray_on(a, b, cpus=2)
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    done = b.run([sys.executable, script], env={"RAY_ADDRESS": address})
    cpus, places = json.loads(done.stdout)
    assert cpus == 4
    assert [name for name, _ in sorted(places)] == ["a", "b"]
    at_a, at_b = (time for _, time in sorted(places))
    assert at_b - at_a > 3000
