"""Names the device that a rank computes on, without CUDA, which would create a context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CPU = "CPU"
_GPU = "GPU"
"""Name of an unknown GPU."""

_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Directory of NVIDIA's driver, with a subdirectory for each GPU, named by its PCI bus address."""


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
    """Return the rank's device: "CPU", "NVIDIA H100 80GB HBM3", or "2 x NVIDIA L4".

    A GPU that can't be named with certainty is "GPU".

    Args:
        gpus: number of GPUs of the rank.
        environment: the process's environment variables.
        driver: the directory of the driver's GPUs.
        devices: the directory of device files.
    """
    if not gpus:
        return CPU
    # Import it late: only processes with GPUs need it.
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
        # CUDA also accepts a prefix of an identifier.
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
