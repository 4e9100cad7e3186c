"""The name of what a rank computes on, from what NVIDIA's driver says of its GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from polytrain.linux.nvidia_gpus import device_name

L4, H100 = "NVIDIA L4", "NVIDIA H100 80GB HBM3"


def install(directory: Path, names: Sequence[str]) -> Path:
    """Make the directory of a driver of these GPUs, with device files of four beside it."""
    for number in range(4):
        (directory / f"nvidia{number}").touch()
    driver = directory / "driver"
    for number, name in enumerate(names):
        place = driver / f"0000:0{number}:00.0"
        place.mkdir(parents=True)
        lines = (f"Model: \t\t {name}", "IRQ:   \t\t 0", f"GPU UUID: \t GPU-{number}aaaa-bb")
        (place / "information").write_text("\n".join(lines))
    return driver


@pytest.mark.parametrize(
    ("there", "count", "variables", "name"),
    [
        ([L4, H100], 0, {}, "CPU"),
        ([H100] * 4, 1, {"CUDA_VISIBLE_DEVICES": "2"}, H100),
        ([H100] * 4, 2, {"CUDA_VISIBLE_DEVICES": "0,3"}, f"2 x {H100}"),
        ([H100] * 4, 4, {}, f"4 x {H100}"),
        # The rank's own come first.
        ([H100] * 4, 1, {}, H100),
        ([H100] * 4, 1, {"CUDA_VISIBLE_DEVICES": "MIG-1"}, H100),
        ([L4, H100], 1, {"CUDA_VISIBLE_DEVICES": "GPU-1aaaa-bb"}, H100),
        ([L4, H100], 1, {"CUDA_VISIBLE_DEVICES": "GPU-0a"}, L4),
        ([L4, H100], 1, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, H100),
        # CUDA's own numbers are by speed: which GPU is meant isn't certain.
        ([L4, H100], 1, {"CUDA_VISIBLE_DEVICES": "1"}, "GPU"),
        ([L4, H100], 2, {"CUDA_VISIBLE_DEVICES": "GPU-0a,GPU-1a"}, f"{L4}, {H100}"),
        # No driver of NVIDIA.
        ([], 1, {}, "GPU"),
        ([], 2, {"CUDA_VISIBLE_DEVICES": ""}, "2 x GPU"),
    ],
)
def test_names(
    tmp_path: Path, there: Sequence[str], count: int, variables: Mapping[str, str], name: str
) -> None:
    driver = install(tmp_path, there)
    assert device_name(count, variables, driver=driver, devices=tmp_path) == name
