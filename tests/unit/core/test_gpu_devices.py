"""Whether a machine has a GPU, from the names of its device files."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytrain.workers.machine_resources import has_gpu_device


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
