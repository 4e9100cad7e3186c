"""Reads the use of NVIDIA's GPUs through NVML, the driver's library. Creates no CUDA context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of a GPU by all processes. A value that the driver doesn't know is None."""

    busy: float | None
    """Share of the driver's last sampling period, at most a second, in which it computed."""

    memory: int | None
    """Bytes of its memory that are in use."""


@contextmanager
def opened_gpus(
    visible: Sequence[str], *, by_place: bool
) -> Iterator[Callable[[], tuple[GpuUse, ...]]]:
    """Open NVML, and yield a function that returns the use of these GPUs.

    Args:
        visible: the GPUs, as CUDA_VISIBLE_DEVICES names them.
        by_place: whether CUDA numbers GPUs by their place on the bus, as NVML does.

    Raises:
        Exception: `pynvml` isn't installed, the driver's library isn't there, or either fails.
    """
    # Import it late: it is optional, and only agents with GPUs need it.
    import pynvml

    def known(ask: Callable[[], Value]) -> Value | None:
        try:
            return ask()
        except pynvml.NVMLError:
            # For example, the driver knows no utilisation of a part of a GPU.
            return None

    def described(index: int) -> tuple[str, str] | None:
        def ask() -> tuple[str, str]:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            return pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)

        return known(ask)

    def use(uuid: str | None) -> GpuUse:
        handle = uuid and known(lambda: pynvml.nvmlDeviceGetHandleByUUID(uuid))
        if not handle:
            return GpuUse(None, None)
        percent = known(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        memory = known(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))
        return GpuUse(None if percent is None else percent / 100, memory)

    pynvml.nvmlInit()
    try:
        there = [described(index) or ("", "") for index in range(pynvml.nvmlDeviceGetCount())]
        # By default CUDA numbers GPUs by their speed.
        is_ordered = by_place or len({kind for kind, _ in there}) == 1
        known_uuids = [uuid for _, uuid in there]
        uuids = [uuid_of(name, known_uuids, is_ordered=is_ordered) for name in visible]
        yield lambda: tuple(map(use, uuids))
    finally:
        pynvml.nvmlShutdown()


def uuid_of(name: str, there: Sequence[str], *, is_ordered: bool) -> str | None:
    """Return the identifier of a GPU, or part of one, that NVML knows; None if it isn't certain.

    Args:
        name: as CUDA_VISIBLE_DEVICES names it: a number, an identifier, or the start of a GPU's.
        there: the identifiers of the machine's GPUs, in NVML's order; "" for a hidden one.
        is_ordered: whether CUDA has the same order.
    """
    if name.startswith("MIG-"):
        return name
    if name.startswith("GPU-"):
        found = [uuid for uuid in there if uuid.startswith(name)]
        return found[0] if len(found) == 1 else None
    if is_ordered and name.isdecimal() and int(name) < len(there):
        return there[int(name)] or None
    return None
