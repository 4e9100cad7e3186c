"""The parts of a training state as they are in memory: if they can be kept, and if they changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from polytrain.extension import NotCleanError
from polytrain_torch.checkpoints.rank_parts import ddp_models, digest
from polytrain_torch.checkpoints.sharded_parts import fsdp_modules, is_consolidated
from polytrain_torch.models.parallel import prepared_models, unwrapped
from polytrain_torch.private import (
    ANY_BATCH_NORM,
    averages_nothing,
    fsdp_groups,
    has_other_users,
    holds_gradients,
    hook_states,
    is_unsynchronized,
    note_synchronization,
    saves_plainly,
    versions_of,
)
from polytrain_torch.survivors import data_accesses, points
from polytrain_torch.survivors.gpu_copies import (
    GpuBuffers,
    GpuCopies,
    GpuQueue,
    Key,
    is_on_gpu,
    key_of,
)
from polytrain_torch.survivors.kept_by_rank import State

_INTEGERS = {each.itemsize: each for each in (torch.int8, torch.int16, torch.int32, torch.int64)}

Sample: TypeAlias = tuple[int, ...] | torch.Tensor
"""Sums of the bits of each parameter's values, or on a GPU the sum of all absolute values; empty as
long as nothing has used `parameter.data`."""

_MOST_ON_CPU = 1 << 20
"""Bytes of an optimizer's state that may be on the CPU while its parameters are on a GPU."""


OnCpu: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""Copies of what isn't on the GPU; numbers of one type together."""


class LiveParts:
    """This rank's parts: large tensors that nobody copies, and what is small beside them."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._others: dict[str, Any] = {}
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module) and _is_plain(unwrapped(part)):
                self.modules[name] = unwrapped(part)
            elif isinstance(part, torch.optim.Optimizer):
                self.optimizers[name] = part
            else:
                self._others[name] = part
        self._fsdp_modules = [each for m in self.modules.values() for each in fsdp_modules(m)]
        self._fsdp_groups = [group for each in self._fsdp_modules for group in fsdp_groups(each)]
        self._parameters = [p for m in self.modules.values() for p in m.parameters()]
        self.buffers = self._buffers_now()
        """Those on a GPU come first."""

        self.views: list[memoryview] = []
        """The bytes of those that are on the CPU."""

        self._addresses: list[int] = []
        """Where the buffers were when the views of them were made."""

        self._may_be_infinite: set[int] = set()
        """Numbers of the buffers that are from the start, such as masks."""

        self._unsaved: dict[int, bytes] = {}
        """Numbers of the buffers that no checkpoint has, and digests of what a restart makes."""

        self.gpu: GpuCopies | None = None
        """Copies the tensors to the host; None if they are there."""

        self.gpu_queue: GpuQueue | None = None
        """Where the training queues its work for the GPU; None without one."""

        self.gpu_buffers: GpuBuffers | None = None
        """The buffers on a GPU, which writes them itself; None if there are none."""

        self.is_sharded = False
        """Whether each rank has a part of the state, which it copies by itself."""

        self.sent: set[int] = set()
        """Ids of the buffers that DDP sends from rank 0."""

        self.compares = False
        """Whether ranks' parameters have to be compared, because no DDP model has sent them."""

        self._groups: list[list[int]] = []
        """How many parameters each optimizer's groups have when a restart would restore them."""

        self._states: list[list[int]] = []
        """The outlines of the optimizers' states that `_large` has, whose ids it keeps in use."""

        self._large: list[torch.Tensor] = []
        self._large_on_cpu: list[torch.Tensor] = []
        """Those that aren't on a GPU, such as an optimizer's counts of steps."""

        self._are_numbers = False
        """Whether these are numbers of one type."""

        self._in_ddp: dict[DistributedDataParallel, frozenset[int]] = {}
        """The models around or inside of the parts whose gradients DDP averages over the ranks,
        with the ids of their parameters."""

        self._local: list[DistributedDataParallel] = []
        """Those whose gradients DDP doesn't average in the last backward pass."""

        self._accesses: int | None = None
        """Uses of `parameter.data` before the first point; None until then."""

        self.note_groups()

    def reshard(self) -> None:
        """Take back what FSDP may have gathered for an evaluation. All ranks call this."""
        for each in self._fsdp_modules:
            each.reshard()

    def fsdp_holds_gradients(self) -> bool:
        """Return whether FSDP adds gradients up that it hasn't averaged over the ranks."""
        return any(map(holds_gradients, self._fsdp_groups))

    def note_groups(self) -> None:
        """Note the optimizers' groups: a restart makes them by the progress that is saved now."""
        self._groups = self._groups_now()

    def _groups_now(self) -> list[list[int]]:
        return [
            [len(group["params"]) for group in each.param_groups]
            for each in self.optimizers.values()
        ]

    def begin(self, *, whose: str, copies_shards: bool, copies_gpu: bool) -> str | None:
        """Look at the parts before they are first kept; return the reason if they can't be.

        Args:
            whose: what has the parts, for messages.
            copies_shards: whether each rank can copy its shards.
            copies_gpu: whether what is on a GPU may be copied to the host before it is written.
        """
        self.reshard()
        tensors = [*self.large(), *self.buffers]
        self.is_sharded = any(isinstance(each, DTensor) for each in tensors)
        known = [torch.Tensor, torch.nn.Parameter]
        if self.is_sharded and copies_shards:
            known.append(DTensor)
        gpus = {tensor.device for tensor in tensors if is_on_gpu(tensor)}
        why_not = (
            (self._unsuitable_devices(gpus, copies_gpu=copies_gpu) if gpus else None)
            or self._unsuitable_tensor(tensors, known)
            or self._unsuitable_training(whose)
        )
        if why_not is not None:
            return why_not
        if dist.get_world_size() > 1:
            self._note_averaging()
        if gpus and self.compares:
            return "its ranks' parameters would have to be compared after each step, on GPUs"
        if gpus:
            self._begin_on_gpu(*gpus)
        self.views = [_bytes_of(each) for each in self.buffers if not is_on_gpu(each)]
        self._addresses = [buffer.data_ptr() for buffer in self.buffers]
        saved = self._saved()
        self._unsaved = {
            number: digest(each)
            for number, each in enumerate(self.buffers)
            if id(each) not in saved
        }
        self._may_be_infinite = {
            number for number, each in enumerate(self.buffers) if not torch.isfinite(each).all()
        }
        return None

    def _begin_on_gpu(self, device: torch.device) -> None:
        self.gpu, self.gpu_queue = GpuCopies(device), GpuQueue(device)
        on_gpu = [*filter(is_on_gpu, self.buffers)]
        if on_gpu and not self.is_sharded:
            self.gpu_buffers = GpuBuffers(on_gpu, self.gpu_queue)
        with self.gpu.aside():
            # Its memory stays with that stream: later no thread has to take any there.
            self._sums()

    def _unsuitable_devices(
        self, devices: Collection[torch.device], *, copies_gpu: bool
    ) -> str | None:
        if not copies_gpu or any(each.type != "cuda" for each in devices):
            return "its tensors are on a device"
        if len(devices) > 1:
            return "its tensors are on several GPUs"
        if {each.index for each in devices} != {torch.cuda.current_device()}:
            return "its tensors aren't on the current GPU: call torch.cuda.set_device first"
        if not all(map(is_on_gpu, self._parameters)):
            return "a part of the model is on a GPU, and another part isn't"
        if sum(each.nbytes for each in self._large_on_cpu) > _MOST_ON_CPU:
            return "an optimizer's state isn't on the GPU"
        return None

    def _unsuitable_tensor(
        self, tensors: Iterable[torch.Tensor], known: Collection[type]
    ) -> str | None:
        if any(type(each) not in known for each in tensors):
            return "its tensors are sharded"
        if any(not buffer.is_contiguous() for buffer in self.buffers):
            return "a buffer isn't contiguous"
        if any(is_consolidated(part) for part in self.parts.values()):
            return "each rank has a part of the optimizer's state"
        if any(isinstance(part, torch.nn.Module) for part in self._others.values()):
            return "a module has a state beside its parameters and buffers"
        return None

    def _unsuitable_training(self, whose: str) -> str | None:
        models = self._models()
        # A hook keeps gradients for later steps, or counts steps without an average, in its state.
        if any(map(hook_states, models)):
            return "DDP has a communication hook with a state, which may keep gradients"
        if any(map(averages_nothing, models)):
            return "DDP has a communication hook that averages nothing (noop_hook)"
        in_ddp = {id(parameter) for model in models for parameter in model.parameters()}
        self.sent = {
            id(buffer)
            for model in models
            if model.broadcast_buffers and dist.get_world_size() > 1
            for buffer in model.module.buffers()
        }
        trained = _trained_by(self.optimizers.values())
        averaging = [
            each for each in self.optimizers.values() if each in points.averaging_optimizers
        ]
        averaged = in_ddp.union(map(id, _trained_by(averaging)))
        is_alone = dist.get_world_size() == 1 or self.is_sharded
        if not is_alone and any(id(each) not in averaged for each in trained):
            return "an optimizer trains parameters outside of DDP"
        # Nothing has made these equal on all ranks but the training function.
        self.compares = not averaged <= in_ddp
        kept = set(map(id, self._parameters))
        if any(id(each) not in kept for each in trained):
            return f"an optimizer trains parameters that aren't in {whose}"
        return None

    def _models(self) -> list[DistributedDataParallel]:
        """Return the DDP models around or inside of the parts."""
        inside = {each for module in self.modules.values() for each in module.modules()}
        found = [each for each in prepared_models if each.module in inside]
        # Looking for torch's own takes a while, which a restart would wait for.
        is_known = len(found) or dist.get_world_size() == 1
        return found if is_known else [*ddp_models()]

    def _note_averaging(self) -> None:
        """Note from here on whether DDP averages the gradients of its models' forward passes."""
        for model in self._models():
            if not getattr(model, "is_virtual", False):
                self._in_ddp[model] = frozenset(map(id, model.parameters()))
                model.register_forward_pre_hook(note_synchronization)

    def note_local_gradients(self) -> None:
        """Note at the beginning of a backward pass whose gradients DDP isn't going to average."""
        self._local = [*filter(is_unsynchronized, self._in_ddp)]

    def has_local_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer's step uses gradients that DDP hasn't averaged.

        Ranks' weights differ then, and none can hand on those of another one.
        """
        if not self._local:
            return False
        trained = [id(each) for each in _trained_by([optimizer])]
        return any(not self._in_ddp[model].isdisjoint(trained) for model in self._local)

    def _saved(self) -> set[int]:
        """Return the ids of the buffers that checkpoints have."""
        found: set[int] = set()
        for module in self.modules.values():
            names = module.state_dict().keys()
            buffers = module.named_buffers(remove_duplicate=False)
            found |= {id(buffer) for name, buffer in buffers if name in names}
        return found

    def _buffers_now(self) -> list[torch.Tensor]:
        """Return each buffer once, those on a GPU first."""
        unique = {id(each): each for m in self.modules.values() for each in m.buffers()}
        return sorted(unique.values(), key=is_on_gpu, reverse=True)

    # What they hold

    def objects(self) -> list[Any]:
        """Return all objects of which the state consists, and what is around them."""
        found: list[Any] = [*self._models()]
        for part in self.parts.values():
            found += [part, unwrapped(part)]
            if isinstance(part, torch.nn.Module):
                found += part.modules()
        return [*found, *self._all_large(), *self.buffers]

    def small(self) -> State:
        """Return what is copied at each point, except buffers, as objects that may change later."""
        return {
            "groups": {
                name: [_without_parameters(group) for group in optimizer.param_groups]
                for name, optimizer in self.optimizers.items()
            },
            "parts": {name: part.state_dict() for name, part in self._others.items()},
            "sample": self._sums() if self.compares else None,
        }

    def large(self) -> list[torch.Tensor]:
        """Return the tensors that aren't copied: parameters, and the optimizers' state."""
        states = [_outline(each.state) for each in self.optimizers.values()]
        if len(self._large) == 0 or states != self._states:
            self._large, self._states = list(self._all_large()), states
            self._large_on_cpu = [each for each in self._large if not is_on_gpu(each)]
            kinds = {(each.dtype, each.ndim) for each in self._large_on_cpu}
            self._are_numbers = len(kinds) == 1 and not self._large_on_cpu[0].ndim
        return self._large

    def on_cpu(self) -> OnCpu:
        """Return copies of what isn't on the GPU: the CPU changes it before the GPU gets there."""
        found = self._large_on_cpu
        # Most optimizers have one number for each parameter.
        return torch.stack(found) if self._are_numbers else [each.clone() for each in found]

    def copies(self, on_cpu: OnCpu, *, with_buffers: bool = False) -> dict[Key, torch.Tensor]:
        """Return copies on the host of what is on a GPU, by their keys; empty if nothing is.

        Args:
            on_cpu: what `on_cpu` has returned at the point.
            with_buffers: whether to copy the buffers, too, as they are now.
        """
        if self.gpu is None:
            return {}
        found = (*self._large, *self.buffers) if with_buffers else self._large
        copies = self.gpu.copied([*filter(is_on_gpu, found)])
        return {**copies, **dict(zip(map(key_of, self._large_on_cpu), on_cpu, strict=True))}

    def large_bytes(self) -> int:
        """Return how many bytes this rank has of them."""
        return sum(local_part(tensor).nbytes for tensor in self.large())

    def _all_large(self) -> Iterator[torch.Tensor]:
        for module in self.modules.values():
            yield from module.parameters()
        for optimizer in self.optimizers.values():
            for state in optimizer.state.values():
                yield from (each for each in state.values() if isinstance(each, torch.Tensor))

    def versions(self) -> Sequence[int]:
        """Return the version of each parameter: it changes with every write."""
        return versions_of(self._parameters)

    def _local_parameters(self) -> Iterator[torch.Tensor]:
        return (local_part(each.detach()) for each in self._parameters)

    def sample(self) -> Sample:
        """Return numbers that change with the parameters' values, if `parameter.data` is in use.

        What is written there shows nowhere else. They cost 4 % of a step of AdamW on a CPU.
        """
        if self._accesses is None:
            data_accesses.count()
            is_aliased = any(has_other_users(each) for each in self._parameters)
            self._accesses = data_accesses.accesses() - is_aliased
        return self._sums() if data_accesses.accesses() > self._accesses else ()

    def _sums(self) -> Sample:
        if self.gpu is not None:
            # One number, which is queued: nobody waits for it here.
            return torch.nn.utils.get_total_norm(self._local_parameters(), 1.0)
        return tuple(total for each in self._local_parameters() for total in _sums_of_bits(each))

    def changed_by_forward(self) -> set[int]:
        """Return ids of the buffers that a forward pass alone changes: those of batch norms."""
        return {
            id(buffer)
            for module in self.modules.values()
            for each in module.modules()
            if isinstance(each, ANY_BATCH_NORM)
            for buffer in each.buffers(recurse=False)
        }

    # Whether it may be written

    def expect_unchanged(
        self,
        versions: Sequence[int],
        sample: Sample | None,
        *,
        last: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            versions: of the parameters at a point.
            sample: theirs, if there is one.
            last: the versions before a step was queued that a GPU hasn't come to; None if they are
                those of now.

        Raises:
            NotCleanError: the state isn't the point's any more.
        """
        if self._groups_now() != self._groups:
            raise NotCleanError("an optimizer's groups have changed since the last report")
        buffers = self._buffers_now()
        if [id(each) for each in buffers] != [id(each) for each in self.buffers] or [
            each.data_ptr() for each in buffers
        ] != self._addresses:
            raise NotCleanError("a module replaces its buffers")
        now = list(self._all_large())
        if len(now) != len(self._large) or any(
            mine is not its for mine, its in zip(now, self._large, strict=True)
        ):
            raise NotCleanError("parts were replaced after the step")
        states = (each for one in self.optimizers.values() for each in one.state.values())
        if last is not None and not all(map(_is_all_tensors, states)):
            raise NotCleanError(
                "an optimizer's state isn't all tensors, and was changed for a step that its GPU "
                "hasn't come to"
            )
        last = self.versions() if last is None else last
        if last != versions or not self._has_sample(sample):
            raise NotCleanError("parameters were changed after the step, outside of an optimizer")

    def _has_sample(self, sample: Sample | None) -> bool:
        if sample is None:
            return True
        now = self.sample()
        if isinstance(sample, torch.Tensor):
            return torch.equal(torch.as_tensor(now).cpu(), sample.cpu())
        if not sample and (isinstance(now, torch.Tensor) or now):
            raise NotCleanError("parameter.data was used after the step, for the first time")
        return now == sample

    def expect_usable(
        self,
        by_rank: Sequence[Sequence[torch.Tensor]],
        copies: Mapping[Key, torch.Tensor],
        *,
        with_large: bool = True,
    ) -> None:
        """
        Args:
            by_rank: each rank's buffers.
            copies: what `copies` has returned.
            with_large: whether to look at the large tensors, too.

        Raises:
            NotCleanError: training couldn't continue from the values, as from an older checkpoint.
        """
        if any(
            digest(each[number]) != its for each in by_rank for number, its in self._unsaved.items()
        ):
            raise NotCleanError(
                "a buffer with persistent=False, which no checkpoint has, changes or differs "
                "between ranks"
            )
        large = [copies.get(key_of(each), each) for each in self._large] if with_large else []
        are_finite = all(_is_finite(local_part(each)) for each in large) and all(
            not torch.isnan(each).any() if number in self._may_be_infinite else _is_finite(each)
            for buffers in by_rank
            for number, each in enumerate(buffers)
        )
        if not are_finite:
            raise NotCleanError("a weight, a buffer or an optimizer's state isn't finite")

    # What is written

    def whole(
        self,
        small: State,
        buffers: Sequence[torch.Tensor],
        copies: Mapping[Key, torch.Tensor],
    ) -> State:
        """Return a rank's state of all parts, with its own small parts and buffers.

        Args:
            small: its small parts.
            copies: what `copies` has returned.
        """
        parts: State = {}
        own = {id(buffer): its for buffer, its in zip(self.buffers, buffers, strict=True)}
        for name in self.parts:
            if name in self.modules:
                module = self.modules[name]
                state = module.state_dict()
                state.update(_on_host(state, copies))
                for key, buffer in module.named_buffers(remove_duplicate=False):
                    if key in state:
                        state[key] = own[id(buffer)]
            elif name in self.optimizers:
                state = self.optimizers[name].state_dict()
                state["state"] = {
                    number: {**its, **_on_host(its, copies)}
                    for number, its in state["state"].items()
                }
                groups = zip(state["param_groups"], small["groups"][name], strict=True)
                state["param_groups"] = [{**live, **its} for live, its in groups]
            else:
                state = small["parts"][name]
            parts[name] = state
        return {"parts": parts, "progress": small["progress"], "own": small["own"]}

    def compared(self, whole: State) -> State:
        """Return what may differ between ranks: neither parameters nor what DDP sends."""
        parts: State = {}
        for name, state in whole["parts"].items():
            if name in self.modules:
                buffers = self.modules[name].named_buffers(remove_duplicate=False)
                parts[name] = {
                    key: state[key]
                    for key, buffer in buffers
                    if key in state and id(buffer) not in self.sent
                }
            elif name in self.optimizers:
                parts[name] = {"param_groups": state["param_groups"]}
            else:
                parts[name] = state
        return {**whole, "parts": parts}


def _on_host(state: Mapping[str, Any], copies: Mapping[Key, torch.Tensor]) -> State:
    """Return the copies of those tensors that have one."""
    return {
        name: copies[key_of(value)]
        for name, value in state.items()
        if copies and isinstance(value, torch.Tensor) and key_of(value) in copies
    }


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether a module's state is its parameters and buffers, and nothing else."""
    return all(map(saves_plainly, module.modules()))


def _trained_by(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types that can be added up on all devices."""


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite.

    Then their sum is, unless it overflows. It takes a tenth of the time.
    """
    own = tensor.detach()
    is_sum_finite = own.dtype in _SUMMED and bool(torch.isfinite(own.sum()))
    return is_sum_finite or bool(torch.isfinite(own).all())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # autograd's view takes ten times as long
        return tensor.to_local()


def _outline(states: Mapping[Any, Mapping[str, Any]]) -> list[int]:
    """Return what changes if an optimizer gets more states, or makes all anew in its step."""
    first = next(iter(states.values()), {})
    return [len(states), *(id(each) for each in first.values() if isinstance(each, torch.Tensor))]


def _is_all_tensors(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state has nothing that an optimizer changes when it queues a step."""
    return all(each is None or isinstance(each, torch.Tensor) for each in state.values())


def _sums_of_bits(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two sums, which don't depend on an order, and are as fast as the memory.

    The first one is of an odd number of values: what adds the same number to the bits of each, such
    as halving or negating them, changes it.
    """
    own = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = _INTEGERS[own.itemsize]
    bits = own.reshape(-1).view(integers)
    odd = bits.numel() - (bits.numel() + 1) % 2
    return int(bits[:odd].sum(dtype=integers)), int(bits[odd:].sum(dtype=integers))


def _without_parameters(group: Mapping[str, Any]) -> State:
    others = dict(group)
    del others["params"]
    return others
