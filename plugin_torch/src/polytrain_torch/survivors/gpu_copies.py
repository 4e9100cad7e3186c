"""Copies of tensors on a GPU, for a thread that must not wait for what the training has queued.

A collective that waits for a lost rank keeps the queue from moving. So a stream of its own copies
through pinned memory that was taken before: taking memory, or loading a kernel, may wait for all
that the GPU is doing. Buffers change with each forward pass, so the GPU itself writes them into the
memory that outlives the process, when it comes to them; a stamp behind them says that it has.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from polytrain.extension import KeptStates

_CHUNK = 16 << 20
"""Bytes that are copied at once."""

STAMPS = struct.Struct("<QQ")
"""The stamp that follows the buffers, and the one that has been written so far."""

_STAMP = STAMPS.size // 2

Key = tuple[int, torch.dtype, torch.Size]
"""What views of the same memory have in common: its address, the type of its values, its shape."""


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU, or any other device."""
    return tensor.device.type != "cpu"


def key_of(tensor: torch.Tensor) -> Key:
    """Return a tensor's key: that of `tensor.detach()` is the same."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def pinned(size: int) -> torch.Tensor:
    """Return so many bytes of memory that GPUs read and write by themselves."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class GpuQueue:
    """The stream on which the training queues its work: events of another one would say nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)

    def expect_current(self) -> None:
        """
        Raises:
            RuntimeError: another stream is current.
        """
        if torch.cuda.current_stream(self._device) != self._stream:
            raise RuntimeError("its steps use more than one stream of the GPU")

    def mark(self) -> torch.cuda.Event:
        """Return an event at the end of what is queued.

        Raises:
            RuntimeError: another stream is current.
        """
        self.expect_current()
        return self._stream.record_event()

    def wait(self) -> None:
        """Wait until all that is queued is done."""
        self._stream.synchronize()


class GpuCopies:
    """Copies from one GPU to the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pinned = [pinned(_CHUNK) for _ in range(2)]
        # The training copies its state, too, while the thread of a survivor may.
        self._lock = threading.Lock()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Have the calling thread use the GPU beside what the training has queued."""
        with torch.cuda.stream(self._stream):
            yield

    def copied(self, tensors: Sequence[torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Return copies of tensors on the host, by their keys."""
        found, pending = {}, _Pending(self._pinned)
        with self._lock, self.aside():
            for tensor in tensors:
                source = tensor.detach()
                if not is_dense(source):
                    found[key_of(tensor)] = source.to("cpu", copy=True)
                    continue
                copy = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
                for begin in range(0, source.nbytes, _CHUNK):
                    end = begin + _CHUNK
                    pending.copy(_bytes_of(source)[begin:end], _bytes_of(copy)[begin:end])
                found[key_of(tensor)] = copy
            pending.finish()
        return found


class _Pending:
    """Copies chunk by chunk: while one is on its way, the one before leaves pinned memory."""

    def __init__(self, pinned: Sequence[torch.Tensor]) -> None:
        self._free = [(each, torch.cuda.Event()) for each in pinned]
        self._under_way: list[tuple[torch.Tensor, torch.cuda.Event, torch.Tensor]] = []

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if not self._free:
            self._take_oldest()
        chunk, event = self._free.pop()
        chunk[: len(source)].copy_(source, non_blocking=True)
        event.record()
        self._under_way.append((chunk, event, target))

    def finish(self) -> None:
        while self._under_way:
            self._take_oldest()

    def _take_oldest(self) -> None:
        chunk, event, target = self._under_way.pop(0)
        event.synchronize()
        target.copy_(chunk[: len(target)])
        self._free.append((chunk, event))


class GpuBuffers:
    """Buffers that a GPU writes behind small states, into the memory that outlives the process."""

    def __init__(self, buffers: Sequence[torch.Tensor], queue: GpuQueue) -> None:
        self._queue = queue
        self._views = [_bytes_of(each.detach()) for each in buffers if each.nbytes]
        size = sum(map(len, self._views))
        self.size = STAMPS.size + size
        """Bytes that they take, with their stamps."""

        self._together = torch.empty(size, dtype=torch.uint8, device=buffers[0].device)
        self._stamp = torch.zeros(1, dtype=torch.int64, device=buffers[0].device)
        self._number = 0
        self._memory = torch.empty(0, dtype=torch.uint8)

    def share(self, kept: KeptStates) -> None:
        """Let the GPU write into the memory of the small states.

        Raises:
            RuntimeError: it can't.
        """
        self._memory = torch.frombuffer(kept.memory, dtype=torch.uint8)
        address, size = self._memory.data_ptr(), self._memory.nbytes
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(error):
            # CUDA keeps the error for the next call, which would be the training's.
            with contextlib.suppress(RuntimeError):
                torch.zeros_like(self._stamp)
        torch.cuda.check_error(error)

    def room(self) -> bytes:
        """Return what stands for the buffers until the GPU has written them."""
        return STAMPS.pack(self._number + 1, 0) + bytes(self.size - STAMPS.size)

    def fill(self, at: int) -> None:
        """Queue that the GPU writes the buffers.

        Args:
            at: where `room` is in the memory.

        Raises:
            RuntimeError: another stream is current than that of the points.
        """
        self._queue.expect_current()
        self._number += 1
        begin = at + STAMPS.size
        torch.cat(self._views, out=self._together)
        self._memory[begin : at + self.size].copy_(self._together, non_blocking=True)
        # After them: whoever reads the stamp first and then the buffers finds these whole.
        self._stamp.fill_(self._number)
        stamp = self._stamp.view(torch.uint8)
        self._memory[begin - _STAMP : begin].copy_(stamp, non_blocking=True)


def arrived(content: bytes) -> bytes | None:
    """Return the buffers' bytes in what `GpuBuffers` wrote; None if the GPU hadn't come to them."""
    expected, written = STAMPS.unpack_from(content)
    return content[STAMPS.size :] if expected == written else None


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values fill its memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
