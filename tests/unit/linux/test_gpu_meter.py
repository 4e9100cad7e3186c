"""The use of a rank's GPUs, as an imitation of the driver's library says it. No GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from polytrain.linux.nvidia_gpus import uuid_of

THERE = ["GPU-aaaa-0000", "GPU-bbbb-1111", ""]

READ = """
import json, sys
from pathlib import Path
from polytrain.linux.nvidia_gpus import GpuMeter
from polytrain.testing.processes import eventually

gpus, devices, visible = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
environment = {"CUDA_VISIBLE_DEVICES": visible, **dict(each.split("=") for each in sys.argv[4:])}
meter, taken = GpuMeter(gpus, environment, devices=devices), ()

def ends() -> bool:
    global taken
    taken = meter.take()
    return bool(taken) or meter._thread is None or not meter._thread.is_alive()

meter.request()
assert eventually(ends)
meter.close()
imported = "pynvml" in sys.modules
print(json.dumps({"read": [[each.busy, each.memory] for each in taken], "imported": imported}))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the driver's library, and one with device files."""
    compiler = shutil.which("cc")
    if compiler is None or find_spec("pynvml") is None:
        pytest.skip("a C compiler or nvidia-ml-py isn't there")
    directory = tmp_path_factory.mktemp("driver")
    source, library = Path(__file__).with_name("nvml.c"), directory / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    (directory / "dev").mkdir()
    for number in range(3):
        (directory / f"dev/nvidia{number}").touch()
    return directory


def read(driver: Path, gpus: int, visible: str, *environment: str, **own: str) -> dict[str, Any]:
    variables = {**os.environ, "LD_LIBRARY_PATH": str(driver), **own}
    command = [sys.executable, "-c", READ, str(gpus), str(driver / "dev"), visible, *environment]
    done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("visible", "used"),
    [
        ("0,1", [[0.75, 40_000_000_000], [0.05, 1_000_000_000]]),
        ("GPU-bbbb", [[0.05, 1_000_000_000]]),
        # The driver knows no utilisation of a part of a GPU.
        ("MIG-dddd", [[None, 7_000_000_000]]),
        ("MIG-gone,1", [[None, None], [0.05, 1_000_000_000]]),
        # It is lost.
        ("2", [[None, None]]),
    ],
)
def test_the_use_of_the_gpus_that_a_rank_has(driver: Path, visible: str, used: list[Any]) -> None:
    assert read(driver, len(used), visible)["read"] == used


def test_with_gpus_of_two_kinds_a_number_names_one_only_in_the_bus_order(driver: Path) -> None:
    assert read(driver, 1, "1", TWO_KINDS="1")["read"] == [[None, None]]
    ordered = read(driver, 1, "1", "CUDA_DEVICE_ORDER=PCI_BUS_ID", TWO_KINDS="1")
    assert ordered["read"] == [[0.05, 1_000_000_000]]


def test_a_driver_that_fails_costs_the_values_alone(driver: Path) -> None:
    assert read(driver, 1, "0", BROKEN_DRIVER="1")["read"] == []
    assert read(driver, 1, "0", LD_LIBRARY_PATH="")["read"] == []


def test_without_the_library_there_are_no_values(driver: Path, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('no module named pynvml')")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    assert read(driver, 1, "0", PYTHONPATH=path) == {"read": [], "imported": False}


def test_the_program_ends_though_the_driver_never_answers(driver: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from polytrain.linux.nvidia_gpus import GpuMeter\n"
        "meter = GpuMeter(1, {}, devices=Path(sys.argv[1]))\n"
        "meter.request()\nmeter.close()\nassert meter.take() == ()\n"
    )
    (devices := driver / "one").mkdir()
    (devices / "nvidia0").touch()
    variables = {**os.environ, "LD_LIBRARY_PATH": str(driver), "HANGING_DRIVER": "1"}
    subprocess.run([sys.executable, "-c", script, devices], env=variables, check=True, timeout=60)


def test_more_gpus_than_the_ranks_are_not_taken_for_its_own(driver: Path) -> None:
    assert read(driver, 1, "0,1")["read"] == []


@pytest.mark.parametrize("gpus", [0, 1])
def test_without_gpus_nothing_is_imported(gpus: int, tmp_path: Path) -> None:
    assert read(tmp_path, gpus, "0") == {"read": [], "imported": False}


@pytest.mark.parametrize(
    ("name", "uuid"),
    [
        ("1", "GPU-bbbb-1111"),
        ("2", None),  # hidden
        ("3", None),
        ("GPU-aaaa", "GPU-aaaa-0000"),
        ("GPU-", None),  # several
        ("GPU-ffff", None),
        ("MIG-5c1f", "MIG-5c1f"),
        ("MIG-GPU-aaaa-0000/1/0", "MIG-GPU-aaaa-0000/1/0"),
    ],
)
def test_the_gpu_that_a_name_stands_for(name: str, uuid: str | None) -> None:
    assert uuid_of(name, THERE, is_ordered=True) == uuid


def test_a_number_says_nothing_in_another_order() -> None:
    assert uuid_of("1", THERE, is_ordered=False) is None
    assert uuid_of("GPU-bbbb", THERE, is_ordered=False) == "GPU-bbbb-1111"
