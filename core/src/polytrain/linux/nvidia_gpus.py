"""NVIDIA's GPUs: their names, and their use, which NVML reads. No CUDA context is created."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from polytrain.linux.machine_resources import visible_gpus

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
        environment: the process's environment variables.
        driver: the directory of the driver's GPUs.
    """
    if not gpus:
        return CPU
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


class GpuMeter:
    """Reads the use of a rank's GPUs when it is asked to, if the driver and its library allow that.

    A driver may take seconds to answer, or never answer once a GPU is lost, and the agent's event
    loop mustn't wait for it.
    """

    def __init__(
        self, gpus: int, environment: Mapping[str, str], *, devices: Path = Path("/dev")
    ) -> None:
        """
        Args:
            gpus: number of the rank's GPUs.
        """
        visible = visible_gpus(environment, devices) if gpus else ()
        # With others beside its own, it isn't known which are the rank's.
        self._gpus = visible if len(visible) == gpus else ()
        self._by_place = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        self._requests: SimpleQueue[bool] = SimpleQueue()
        """Whether to read them, or to end."""

        self._thread: Thread | None = None
        self._newest: tuple[GpuUse, ...] = ()

    def request(self) -> None:
        """Have them read, without waiting for it."""
        if not self._gpus:
            return
        if self._thread is None:
            # A daemon, because the program's end mustn't wait for a driver either.
            self._thread = Thread(target=self._run, name="polytrain-gpus", daemon=True)
            self._thread.start()
        if self._requests.empty():
            self._requests.put(True)

    def take(self) -> tuple[GpuUse, ...]:
        """Return what has been read since the last call: nothing, or a value for each GPU."""
        newest, self._newest = self._newest, ()
        return newest

    def close(self) -> None:
        """Have the driver's library closed, without waiting for it."""
        if self._thread is not None:
            self._requests.put(False)

    def _run(self) -> None:
        # Whatever fails in the library or the driver costs these values, never the rank.
        with suppress(Exception), opened_gpus(self._gpus, by_place=self._by_place) as read:
            while self._requests.get():
                self._newest = read()
