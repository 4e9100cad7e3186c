"""The engine: one process group per attempt, over a store that rank 0 serves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polytrain import CheckpointError
from polytrain.extension import training_begins
from polytrain_plugins import (
    Engine,
    Member,
    Offer,
    Predictions,
    Shard,
    World,
    changed_environment,
    listening_socket,
    nccl_variables,
)
from polytrain_torch.backend import Torch
from polytrain_torch.checkpoints.safe_serialization import loaded
from polytrain_torch.checkpoints.state_files import MODEL_FILE
from polytrain_torch.collectives.call_agreement import agree_on_call, agreeing
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.collectives.node_group import forget_group
from polytrain_torch.devices import current_device, offered, own_device
from polytrain_torch.extension_locks import guarded_extension_locks
from polytrain_torch.libraries import give_rank
from polytrain_torch.models.parallel import unwrapped
from polytrain_torch.private import clear_mesh_caches, makes_state
from polytrain_torch.randomness import share_seed
from polytrain_torch.shard import TorchShard
from polytrain_torch.survivors.depot import (
    depositing,
    key_details,
    second_store,
    serves_second,
)
from polytrain_torch.virtual_workers import virtual_workers

_LEFT_WITHIN_S = 5.0
"""Seconds that rank 0 waits at most for the other ranks to leave the collective."""

_NAP_S = 0.001

DEEPSPEED = "deepspeed"
"""DeepSpeed's directory in a checkpoint."""

_SIOCGIFADDR = 0x8915


@contextmanager
def _first_step_noted() -> Iterator[None]:
    """Note the first step of an optimizer in a block of code."""
    has_stepped = False

    @torch.compiler.disable
    def note(*_: Any) -> None:
        nonlocal has_stepped
        if not has_stepped and not makes_state():
            has_stepped = True
            training_begins()

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()


def _leave(store: TCPStore, world: World) -> None:
    """Leave the store. Rank 0 serves it, and leaves last.

    Of a store that goes while a rank uses it, torch prints the stacks of its own C++ code.
    """
    deadline = time.monotonic() + _LEFT_WITHIN_S
    with contextlib.suppress(RuntimeError):  # rank 0 has left
        left = store.add("left", 1)
        while world.me.rank == 0 and left < world.size and time.monotonic() < deadline:
            time.sleep(_NAP_S)
            left = store.add("left", 0)


class TorchEngine(Engine[Any]):
    """One rank of torch's process group."""

    uses_depot: ClassVar[bool] = True
    """Whether ranks lay their small states down on another host."""

    def __init__(self, options: Torch) -> None:
        self.timeout = timedelta(seconds=options.timeout_s)
        self._process_group = options.process_group
        self._store: TCPStore | None = None
        self._second: TCPStore | None = None
        """The store that this rank serves for the ranks on rank 0's host; see `depot`."""

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        if me.rank != 0:
            serves = self.uses_depot and serves_second(me)
            second = second_store(me, self.timeout) if serves else None
            if second is None:
                yield Offer(details=offered(me))
                return
            self._second, port = second
            yield Offer(host=me.listen_host, port=port, details=offered(me))
            return
        host = me.listen_host
        # By default the store would listen on all interfaces.
        listener = listening_socket(host, me.ports)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            # The store closes the listener.
            master_listen_fd=listener.detach(),
        )
        yield Offer(host=host, port=port, details={**offered(me), **key_details()})

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        me = world.me
        store = self.store(world)
        device = own_device(world)
        with guarded_extension_locks(), changed_environment(variables(world)):
            give_rank(world.me)
            dist.init_process_group(
                backend=self._process_group or ("nccl" if me.gpus else "gloo"),
                store=store,
                rank=me.rank,
                world_size=world.size,
                timeout=self.timeout,
                device_id=device,
            )
            share_seed(store)
            is_over = False
            try:
                connected = partial(self._connected, world)
                with (
                    agreeing(store, connected, timeout_s=self.timeout.total_seconds()),
                    virtual_workers(world),
                    depositing(world, self.timeout),
                    _first_step_noted(),
                ):
                    yield
                is_over = True
            finally:
                # The training function may have destroyed the group.
                if dist.is_initialized():
                    dist.destroy_process_group()
                forget_group()
                clear_mesh_caches()
                if is_over:
                    _leave(store, world)
                self.close()

    def store(self, world: World) -> TCPStore:
        """Return this rank's connection to the attempt's store, which rank 0 serves."""
        return self._store or self._connected(world)

    def _connected(self, world: World) -> TCPStore:
        """Open another connection to the store."""
        leader = world.leader
        assert leader.host is not None
        assert leader.port is not None
        return TCPStore(leader.host, leader.port, is_master=False, timeout=self.timeout)

    def close(self) -> None:
        """Stop serving the stores."""
        self._store = self._second = None

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        sums = torch.tensor(values, dtype=torch.int64, device=current_device())
        dist.all_reduce(sums)
        return [int(number) for number in sums.tolist()]

    def gather_over_ranks(self, piece: bytes, world: World, *, call: str) -> list[bytes]:
        # Its error names a rank that is in another collective, or has left its training function.
        agree_on_call(call)
        return gathered(piece)

    def adapt(self, shard: Shard) -> TorchShard:
        return TorchShard(shard)

    def save(self, model: Any, directory: Path) -> None:
        """Write a module's weights, without DDP's prefix in their names."""
        state = unwrapped(model).state_dict()
        try:
            # Torch's own writer raises no error of the system, as that of a full disk.
            with (directory / MODEL_FILE).open("wb") as file:
                torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    def digests(self, model: Any) -> Mapping[str, str]:
        from polytrain_torch.checkpoints.state_digests import digests_held

        return digests_held()

    def load(self, directory: Path) -> Any:
        """Return the model's unsharded `state_dict`, on the CPU.

        Raises:
            CheckpointError: the files are DeepSpeed's, which can't be loaded safely.
        """
        if (directory / MODEL_FILE).exists():
            return loaded(directory / MODEL_FILE)
        from polytrain_torch.checkpoints.sharded import has_shards, whole_model

        if has_shards(directory):
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
        from polytrain_torch.predictions.predictor import ModulePredictor

        return ModulePredictor(directory, self.load, **options)


def variables(world: World) -> dict[str, str]:
    """Return the environment variables that `torchrun` sets, for libraries that read them."""
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
        **_chosen_interface(me),
    }


def _without_gpus(me: Member) -> dict[str, str]:
    """Return the variable that lets Accelerate, also in Transformers, use several CPU processes."""
    if me.gpus or "ACCELERATE_USE_CPU" in os.environ:
        return {}
    return {"ACCELERATE_USE_CPU": "true"}


def _chosen_interface(me: Member) -> dict[str, str]:
    """Return the variables that have NCCL and TensorPipe use the interface that the user chose."""
    if me.interface is None or me.node_count == 1 or "TP_SOCKET_IFNAME" in os.environ:
        return nccl_variables(me)
    return {**nccl_variables(me), "TP_SOCKET_IFNAME": me.interface}


def _gloo_interface(host: str) -> dict[str, str]:
    """Return the variable that has gloo use the network interface with an address.

    By default gloo uses the interface that the hostname resolves to. On many machines that is the
    loopback, which ranks on other nodes can't reach.
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
