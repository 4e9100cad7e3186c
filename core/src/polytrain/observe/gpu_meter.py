"""Reads the use of a rank's GPUs in a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from polytrain.linux.machine_resources import visible_gpus
from polytrain.linux.nvidia_gpus import GpuUse, opened_gpus


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
            environment: variables of its worker processes.
            devices: the directory of device files.
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
