"""Which GPUs a machine has, from the names of its device files."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain.linux.machine_resources import has_gpu_device, visible_gpus


@pytest.mark.parametrize("name", ["nvidia0", "kfd", "dxg", "dri/renderD128"])
def test_a_gpu(name: str, tmp_path: Path) -> None:
    assert not has_gpu_device(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert has_gpu_device(tmp_path)


@pytest.mark.parametrize("name", ["nvidiactl", "dri/card0", "null"])
def test_other_devices(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert not has_gpu_device(tmp_path)


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("2", ("2",)),
        ("1, 0", ("1", "0")),
        ("0,7,1", ("0",)),
        ("-1", ()),
        ("GPU-8f2a,MIG-7c1d", ("GPU-8f2a", "MIG-7c1d")),
    ],
)
def test_gpus_that_cuda_shows(given: str | None, seen: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_gpus(environment, tmp_path) == seen


@pytest.mark.parametrize("given", [None, "0", "GPU-8f2a"])
def test_a_variable_makes_no_gpu(given: str | None, tmp_path: Path) -> None:
    environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_gpus(environment, tmp_path) == ()
