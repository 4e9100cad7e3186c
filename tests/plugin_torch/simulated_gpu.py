"""A GPU that does what is queued when a test says so, simulated by tensors on the CPU.

Its tensors are all but an optimizer's counts of steps, which PyTorch keeps on the CPU. They have
their new values at once: only the events and the copies of buffers wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polytrain_torch.survivors import gpu_copies, live_parts


class SimulatedGpu:
    """A queue of what the GPU has to do."""

    def __init__(self) -> None:
        self._queued: deque[Callable[[], None]] = deque()
        self._done = 0

    def queue(self, work: Callable[[], None] = lambda: None) -> SimulatedEvent:
        """Queue work; return the event that it is done."""
        self._queued.append(work)
        return SimulatedEvent(self, self._done + len(self._queued))

    def work_off(self, *, but: int = 0) -> None:
        """Do all that is queued, but the last few."""
        while len(self._queued) > but:
            self._queued.popleft()()
            self._done += 1

    def lose(self) -> None:
        """Drop what is queued: the process has been killed."""
        self._queued.clear()

    def has_done(self, count: int) -> bool:
        return self._done >= count


class SimulatedEvent:
    def __init__(self, gpu: SimulatedGpu, count: int) -> None:
        self._gpu = gpu
        self._count = count

    def query(self) -> bool:
        return self._gpu.has_done(self._count)

    def synchronize(self) -> None:
        if not self.query():
            raise AssertionError("it would wait for ever")


class _Copied:
    """An event of the stream that copies beside the training: nothing keeps it waiting."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def simulate_gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """Have tensors on the CPU count as a GPU's, until the test ends."""
    gpu = SimulatedGpu()

    def is_on_gpu(tensor: torch.Tensor) -> bool:
        return tensor.ndim > 0 or not tensor.is_floating_point()

    def unsuitable(*_: Any, **__: Any) -> None:
        """Of what the devices are, nothing is unsuitable."""

    for module in (gpu_copies, live_parts):
        monkeypatch.setattr(module, "is_on_gpu", is_on_gpu)
    monkeypatch.setattr(live_parts.LiveParts, "_unsuitable_devices", unsuitable)
    monkeypatch.setattr(gpu_copies, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Event", _Copied)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    stream = SimpleNamespace(record_event=gpu.queue, synchronize=gpu.work_off)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None)
    fill = gpu_copies.GpuBuffers.fill

    def queue_fill(buffers: gpu_copies.GpuBuffers, at: int) -> None:
        content = torch.cat(buffers._views)
        before, own = buffers._number, buffers._views
        buffers._number += 1

        def write() -> None:
            now = buffers._number
            buffers._number, buffers._views = before, [content]
            fill(buffers, at)
            buffers._number, buffers._views = now, own

        gpu.queue(write)

    monkeypatch.setattr(gpu_copies.GpuBuffers, "fill", queue_fill)
    return gpu
