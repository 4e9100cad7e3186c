"""The engine: a process group for each attempt, over a store that rank 0 serves."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel

from polytrain import CheckpointError
from polytrain.extension import TensorShapes, check_named, check_range
from polytrain_plugins import (
    Batches,
    Engine,
    Member,
    Offer,
    Predictions,
    Shard,
    ShardView,
    World,
    changed_environment,
)
from polytrain_torch.backend import Torch
from polytrain_torch.collecting import gathered
from polytrain_torch.devices import offered, own_device
from polytrain_torch.meetings import held, meet
from polytrain_torch.mesh_caches import forget_meshes
from polytrain_torch.moving import moved
from polytrain_torch.node_group import forget_group
from polytrain_torch.randomness import share_seed
from polytrain_torch.row_batches import StandIn, format_for, refuse_texts
from polytrain_torch.row_weights import WeightedLoop, weighted_loop
from polytrain_torch.sharded import is_sharded, whole_model

MODEL_FILE = "model.pt"
DEEPSPEED = "deepspeed"
"""DeepSpeed's directory in a checkpoint."""

_SIOCGIFADDR = 0x8915

_RAGGED_REMEDY = (
    "Pass collate_fn=… to iter_torch_batches, which makes tensors from a dict of arrays, or bring "
    "all rows to one shape in DataConfig(transform=…)."
)


class TorchEngine(Engine[Any]):
    """One rank of torch's process group."""

    def __init__(self, options: Torch) -> None:
        self.timeout = timedelta(seconds=options.timeout_s)
        self._process_group = options.process_group
        self._store: TCPStore | None = None

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        if me.rank != 0:
            yield Offer(details=offered(me))
            return
        host = me.listen_host
        # By itself the store would listen on all interfaces. Port 0: the system chooses a free one.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            # The store closes it.
            master_listen_fd=listener.detach(),
        )
        yield Offer(host=host, port=port, details=offered(me))

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        me = world.me
        store = self.store(world)
        device = own_device(world)
        with changed_environment(variables(world)):
            dist.init_process_group(
                backend=self._process_group or ("nccl" if me.gpus else "gloo"),
                store=store,
                rank=me.rank,
                world_size=world.size,
                timeout=self.timeout,
                device_id=device,
            )
            share_seed(store)
            try:
                connected = partial(self._connected, world)
                with held(store, connected, timeout_s=self.timeout.total_seconds()):
                    yield
            finally:
                # The training function may have destroyed it.
                if dist.is_initialized():
                    dist.destroy_process_group()
                forget_group()
                forget_meshes()
                self.close()

    def store(self, world: World) -> TCPStore:
        """The store of the attempt, which rank 0 serves."""
        return self._store or self._connected(world)

    def _connected(self, world: World) -> TCPStore:
        """Another connection to the store."""
        leader = world.leader
        assert leader.host is not None
        assert leader.port is not None
        return TCPStore(leader.host, leader.port, is_master=False, timeout=self.timeout)

    def close(self) -> None:
        """Stop serving the store."""
        self._store = None

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        sums = torch.tensor(values, dtype=torch.int64, device=current_device())
        dist.all_reduce(sums)
        return [int(number) for number in sums.tolist()]

    def gather_over_ranks(self, piece: bytes, world: World, *, call: str) -> list[bytes]:
        # Names a rank that is in another collective, or has ended its training function.
        meet(call)
        return gathered(piece)

    def adapt(self, shard: Shard) -> TorchShard:
        return TorchShard(shard)

    def save(self, model: Any, directory: Path) -> None:
        """Write a module's weights, without DDP's prefix in their names."""
        torch.save(unwrapped(model).state_dict(), directory / MODEL_FILE)

    def load(self, directory: Path) -> Any:
        """The `state_dict` of the model, on the CPU, also if every rank wrote a part of it.

        Raises:
            CheckpointError: the files are DeepSpeed's, which can't be loaded safely.
        """
        if (directory / MODEL_FILE).exists():
            return torch.load(directory / MODEL_FILE, weights_only=True, map_location="cpu")
        if is_sharded(directory):
            return whole_model(directory)
        if (directory / DEEPSPEED).is_dir():
            raise CheckpointError(
                "The checkpoint is DeepSpeed's, whose files are pickles: loading them can run what "
                "is in them. If you trust whoever wrote it, call "
                "polytrain_torch.deepspeed.load_model(result.checkpoint)."
            )
        files = ", ".join(sorted(file.name for file in directory.iterdir()))
        raise FileNotFoundError(
            f"The checkpoint has no {MODEL_FILE}; it has {files}. Load files of Lightning, "
            "Transformers or Accelerate with that library, from Result.checkpoint.path."
        )

    def model_columns(
        self, directory: Path, columns: Sequence[str], **options: Any
    ) -> Sequence[str] | None:
        features = options.get("features")
        return [features] if isinstance(features, str) else features

    def predictor(self, directory: Path, **options: Any) -> Callable[[pa.Table], Predictions]:
        from polytrain_torch.predicting import ModulePredictor

        return ModulePredictor(directory, self.load, **options)


def unwrapped(part: Any) -> Any:
    """The module inside DDP and `torch.compile` wrappers; any other value as it is."""
    if isinstance(part, DistributedDataParallel):
        return unwrapped(part.module)
    if isinstance(part, torch.nn.Module) and hasattr(part, "_orig_mod"):
        return unwrapped(part._orig_mod)
    return part


class TorchShard(ShardView):
    """A shard that also gives batches of tensors.

    The gradients of prepared models are weighted by each batch's rows.
    """

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        self._is_weighted_by_function = False
        self._loop: WeightedLoop | None = None

    @property
    def gradient_weight(self) -> float:  # type: ignore[override]  # see ShardView
        """This rank's share of the latest global batch, times the number of ranks.

        Whoever reads it weighs the losses of this shard's batches: nobody else does from then on.
        """
        self._is_weighted_by_function = True
        if self._loop is not None:
            self._loop.weight.value = 1
        return self._shard.gradient_weight

    def iter_batches(self, **arguments: Any) -> Batches:
        batches = self._shard.iter_batches(**arguments)

        def weighted() -> Iterator[Any]:
            with weighted_loop() as loop:
                self._loop = loop
                for batch in batches:
                    is_weighted = self._is_weighted_by_function
                    loop.given(1 if is_weighted else self._shard.gradient_weight, batch)
                    yield batch

        return Batches(weighted, batches.__len__)

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        prefetch_batches: int = 1,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: torch.device | str | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        local_shuffle_buffer_size: None = None,
        local_shuffle_seed: None = None,
        pin_memory: bool = False,
    ) -> Batches:
        """Batches as dicts of column name to tensor; each iteration is an epoch. See
        `Shard.iter_batches`.

        A column of lists becomes a tensor `(rows, length, …)` if all lists have one shape.

        If a global batch has fewer rows than there are workers, a worker without a row gets a row
        of its own again, so that its loss isn't the mean of nothing; `gradient_weight` is 0 then.

        Args:
            batch_size: rows in a worker's batch, at most.
            global_batch_size: rows in the batches of all workers together, at most.
            drop_last: give full batches only.
            prefetch_batches: prepare this many batches ahead, on a thread, and copy them to the
                device.
            dtypes: type of all columns, or of each by name; otherwise that of the data.
            device: where the tensors go; this worker's own device by default, as with "auto".
            collate_fn: makes a batch from a dict of column name to NumPy array, for example padded
                tensors from lists of different lengths (an array of arrays). It runs on the thread
                that prepares batches. Tensors in the dicts, lists and tuples that it returns are
                moved to the device. A collate class of Ray Data gets the format that it is for.
            local_shuffle_buffer_size: refused; the data set's `DataConfig` has its order.
            local_shuffle_seed: refused too.
            pin_memory: no effect: columns are always copied to a GPU from pinned memory.

        Raises:
            ValueError: if both `collate_fn` and `dtypes` are given, or a refused argument is; if
                `dtypes` names no column, or a type of whole numbers that doesn't hold the values.
            TypeError: if a column holds texts, which shows at once, or anything else than numbers
                and booleans, or lists that differ in shape, and there is no `collate_fn`.
        """
        if collate_fn is not None and dtypes is not None:
            raise ValueError(
                f"dtypes={dtypes!r}: it can't be used with collate_fn, which makes the tensors. "
                "Convert them in collate_fn"
            )
        check_named(dtypes, self.schema().names)
        if collate_fn is None:
            refuse_texts(self.schema())
        target = current_device() if device in (None, "auto") else torch.device(device)
        shapes = TensorShapes(self.name, _RAGGED_REMEDY)
        batch_format = format_for(collate_fn)
        stand_in = StandIn(self._shard, batch_format)

        def tensors(batch: Any) -> Any:
            batch = stand_in.of(batch)
            if collate_fn is not None:
                return moved(collate_fn(batch), target)
            for name, array in batch.items():
                shapes.check(name, array)
            return {
                name: _on_device(_tensor(name, array, dtypes), target)
                for name, array in batch.items()
            }

        return self.iter_batches(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            prefetch_batches=prefetch_batches,
            batch_format=batch_format,
            convert=tensors,
            # A loop that trains nothing weighs no rows, and wants each of them once.
            allow_empty=torch.is_grad_enabled(),
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )


def current_device() -> torch.device:
    """This process's GPU, or the CPU."""
    if torch.cuda.is_available() and os.environ.get("POLYTRAIN_GPUS", "0") != "0":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _tensor(name: str, array: Any, dtypes: Any) -> torch.Tensor:
    dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        _check_range(name, array, dtype)
    try:
        return torch.as_tensor(array, dtype=dtype)
    except TypeError as error:
        raise TypeError(
            f"The column {name!r} of type {array.dtype} can't become a tensor. "
            "Encode it as numbers in DataConfig(transform=…)."
        ) from error


def _check_range(name: str, array: Any, dtype: torch.dtype) -> None:
    if dtype != torch.bool:
        ends = torch.iinfo(dtype)
        check_range(name, array, ends.min, ends.max)


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from pinned memory runs while the device computes.
    return tensor.pin_memory().to(device, non_blocking=True)


def variables(world: World) -> dict[str, str]:
    """The variables that `torchrun` sets, for libraries that read them."""
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
        **_gloo_interface(me.listen_host),
    }


def _without_gpus(me: Member) -> dict[str, str]:
    """The variable with which Accelerate, also inside Transformers, uses several CPU processes."""
    if me.gpus or "ACCELERATE_USE_CPU" in os.environ:
        return {}
    return {"ACCELERATE_USE_CPU": "true"}


def _gloo_interface(host: str) -> dict[str, str]:
    """The network interface with an address, for gloo.

    By default gloo uses the interface that the hostname resolves to. On many machines that is the
    loopback, to which ranks on other nodes can't connect.
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
