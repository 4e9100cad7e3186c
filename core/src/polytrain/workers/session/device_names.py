"""What a rank computes on, by name, without asking CUDA: that would create a context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CPU = "CPU"
_GPU = "GPU"
"""A GPU whose name isn't known."""

_DRIVER = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver has a directory for each GPU there, by its place on the bus."""


@dataclass(frozen=True, slots=True)
class _Gpu:
    name: str
    uuid: str


def device_name(
    gpus: int,
    environment: Mapping[str, str],
    *,
    driver: Path = _DRIVER,
    devices: Path = Path("/dev"),
) -> str:
    """Return what a rank computes on: "CPU", "NVIDIA H100 80GB HBM3", or "2 x NVIDIA L4".

    A GPU that NVIDIA's driver doesn't name, or not for certain, is "GPU".

    Args:
        gpus: how many the rank has.
        environment: its process's variables.
        driver: the directory of the driver's GPUs.
        devices: the directory of the device files.
    """
    if not gpus:
        return CPU
    # With what it imports it is for the few that have GPUs.
    from polytrain.linux.machine_resources import visible_gpus

    there = tuple(_gpus_of(driver))
    names = [_name(each, there, environment) for each in visible_gpus(environment, devices)][:gpus]
    counted = Counter(names + [_GPU] * (gpus - len(names)))
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counted.items())


def _gpus_of(driver: Path) -> Iterator[_Gpu]:
    for file in sorted(driver.glob("*/information")):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        known = {
            name.strip(): value.strip() for name, _, value in (it.partition(":") for it in lines)
        }
        yield _Gpu(known.get("Model") or _GPU, known.get("GPU UUID", ""))


def _name(visible: str, there: Sequence[_Gpu], environment: Mapping[str, str]) -> str:
    for each in there:
        # CUDA takes the beginning of an identifier, too.
        if visible.startswith("GPU-") and each.uuid.startswith(visible):
            return each.name
    kinds = {each.name for each in there}
    if len(kinds) == 1:
        return kinds.pop()
    # By default CUDA numbers GPUs by their speed.
    by_place = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_place and visible.isdigit() and int(visible) < len(there):
        return there[int(visible)].name
    return _GPU
