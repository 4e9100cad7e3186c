"""The trainer half: the process group over a store that rank 0 serves, new for each attempt."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel

from polytrain.extension import TensorShapes
from polytrain_plugins import (
    Batches,
    Engine,
    Member,
    Offer,
    Shard,
    ShardView,
    World,
    changed_environment,
)
from polytrain_torch.backend import Torch
from polytrain_torch.devices import offered, own_device
from polytrain_torch.moving import moved
from polytrain_torch.node_group import forget_group
from polytrain_torch.sharded import is_sharded, whole_model

MODEL_FILE = "model.pt"
DEEPSPEED = "deepspeed"
"""The directory that is DeepSpeed's own, within a checkpoint that has one."""

_SIOCGIFADDR = 0x8915

_RAGGED_REMEDY = (
    "Pass collate_fn=… to iter_torch_batches, which makes tensors of a dict of arrays, or bring "
    "all rows to one shape by DataConfig(transform=…)."
)


class TorchEngine(Engine[Any]):
    """Everything that a training function finds around it."""

    def __init__(self, options: Torch) -> None:
        self._timeout = timedelta(seconds=options.timeout_s)
        self._process_group = options.process_group
        self._store: TCPStore | None = None

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        if me.rank != 0:
            yield Offer(details=offered(me))
            return
        # Port 0: the store listens on a port of its own from here on, so there is none to guess.
        self._store = TCPStore(
            me.host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        yield Offer(host=me.host, port=self._store.port, details=offered(me))

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        me, leader = world.me, world.leader
        assert leader.host is not None
        assert leader.port is not None
        store = self._store or TCPStore(
            leader.host, leader.port, is_master=False, timeout=self._timeout
        )
        device = own_device(world)
        with changed_environment(_variables(world)):
            dist.init_process_group(
                backend=self._process_group or ("nccl" if me.gpus else "gloo"),
                store=store,
                rank=me.rank,
                world_size=world.size,
                timeout=self._timeout,
                device_id=device,
            )
            try:
                yield
            finally:
                # The training function may have destroyed it.
                if dist.is_initialized():
                    dist.destroy_process_group()
                forget_group()
                self._store = None

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        sums = torch.tensor(values, dtype=torch.int64, device=current_device())
        dist.all_reduce(sums)
        return [int(number) for number in sums.tolist()]

    def adapt(self, shard: Shard) -> TorchShard:
        return TorchShard(shard)

    def save(self, model: Any, directory: Path) -> None:
        """Write a module's weights, without the names that DDP puts in front."""
        torch.save(unwrapped(model).state_dict(), directory / MODEL_FILE)

    def load(self, directory: Path) -> Any:
        """The `state_dict` of the model, on the CPU, also if every rank wrote a part of it."""
        if (directory / DEEPSPEED).is_dir():
            from polytrain_torch.deepspeed import whole_model as whole_model_of_deepspeed

            return whole_model_of_deepspeed(directory)
        if (directory / MODEL_FILE).exists():
            return torch.load(directory / MODEL_FILE, weights_only=True, map_location="cpu")
        if is_sharded(directory):
            return whole_model(directory)
        files = ", ".join(sorted(file.name for file in directory.iterdir()))
        raise FileNotFoundError(
            f"The checkpoint has no {MODEL_FILE}; it has {files}. What Lightning, Transformers or "
            "Accelerate have saved is theirs to load, from Result.checkpoint.path."
        )


def unwrapped(part: Any) -> Any:
    """What DDP and `torch.compile` have been wrapped around; anything else as it is."""
    if isinstance(part, DistributedDataParallel):
        return unwrapped(part.module)
    if isinstance(part, torch.nn.Module) and hasattr(part, "_orig_mod"):
        return unwrapped(part._orig_mod)
    return part


class TorchShard(ShardView):
    """A shard that also gives batches of tensors."""

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        prefetch_batches: int = 1,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: torch.device | str | None = None,
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Batches:
        """Batches as dicts of column name to tensor, an epoch with each iteration; see
        `Shard.iter_batches`.

        A column of lists becomes a tensor `(rows, length, …)` if all lists have one shape.

        Args:
            batch_size: rows in a worker's batch, at most.
            global_batch_size: rows in the batches of all workers together, at most.
            drop_last: give full batches only.
            prefetch_batches: prepare this many batches ahead, on a thread, and have them on the
                device in time.
            dtypes: type of all columns, or of each by name; otherwise that of the data.
            device: where the tensors go; this worker's own device by default, as with "auto".
            collate_fn: makes the batch that is given from a dict of column name to NumPy array,
                such as padded tensors of lists of different lengths (an array of arrays). It runs
                on the thread that prepares batches. Tensors in dicts, lists and tuples that it
                returns go to the device.

        Raises:
            ValueError: if both `collate_fn` and `dtypes` are given.
            TypeError: if a column holds neither numbers nor booleans, or lists that differ in
                shape, and there is no `collate_fn`.
        """
        if collate_fn is not None and dtypes is not None:
            raise ValueError(
                f"dtypes={dtypes!r}: with collate_fn there are no tensors yet whose type it could "
                "say; convert them in collate_fn"
            )
        target = current_device() if device in (None, "auto") else torch.device(device)
        shapes = TensorShapes(self.name, _RAGGED_REMEDY)

        def tensors(batch: dict[str, Any]) -> Any:
            for name, array in batch.items():
                shapes.check(name, array)
            return {
                name: _on_device(_tensor(name, array, dtypes), target)
                for name, array in batch.items()
            }

        def collated(batch: dict[str, Any]) -> Any:
            return moved(collate_fn(batch), target)

        return self._shard.iter_batches(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            prefetch_batches=prefetch_batches,
            convert=tensors if collate_fn is None else collated,
        )


def current_device() -> torch.device:
    """The GPU that this process was given, or the CPU."""
    if torch.cuda.is_available() and os.environ.get("POLYTRAIN_GPUS", "0") != "0":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _tensor(name: str, array: Any, dtypes: Any) -> torch.Tensor:
    dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
    try:
        return torch.as_tensor(array, dtype=dtype)
    except TypeError as error:
        raise TypeError(
            f"The column {name!r} of type {array.dtype} can't become a tensor; "
            "encode it as numbers before training."
        ) from error


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    # From pinned memory a copy runs beside whatever the device computes.
    return tensor.pin_memory().to(device, non_blocking=True)


def _variables(world: World) -> dict[str, str]:
    """What `torchrun` sets: libraries that read these work untouched."""
    me, leader = world.me, world.leader
    return {
        "RANK": str(me.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(me.local_rank),
        "LOCAL_WORLD_SIZE": str(me.local_world_size),
        "NODE_RANK": str(me.node_rank),
        "GROUP_RANK": str(me.node_rank),
        "MASTER_ADDR": str(leader.host),
        "MASTER_PORT": str(leader.port),
        "POLYTRAIN_GPUS": str(me.gpus),
        **_without_gpus(me),
        **_gloo_interface(me.host),
    }


def _without_gpus(me: Member) -> dict[str, str]:
    """What Accelerate, and Transformers by it, asks before it takes several processes on CPUs."""
    if me.gpus or "ACCELERATE_USE_CPU" in os.environ:
        return {}
    return {"ACCELERATE_USE_CPU": "true"}


def _gloo_interface(host: str) -> dict[str, str]:
    """The interface that has the node's address, for gloo.

    It would otherwise take the one that the hostname resolves to, which on many machines is the
    loopback, and ranks on other nodes could not connect.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return {"GLOO_SOCKET_IFNAME": name}
    return {}
