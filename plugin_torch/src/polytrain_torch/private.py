"""The private names of torch, Accelerate, DeepSpeed and TensorBoard that polytrain uses.

Each has the reason why no public name will do, and only this module breaks if a newer version
renames one. It imports torch only; `lightning` and `transformers` have such modules of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import chain
from operator import attrgetter
from types import BuiltinMethodType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

# torch's modules use `tree_map` for batches of any structure: dicts, lists, tuples and classes that
# libraries have registered. No public module has it.

ANY_BATCH_NORM: Any = _BatchNorm
"""The base class of torch's batch norms; `BatchNorm1d` to `3d` check the input's dimensions."""

COMPOSABLE_STATES = frozenset({REGISTRY_KEY, STATE_KEY})
"""The attributes in which `fully_shard` keeps on a module what it works with."""

FORWARDED_OPERATIONS = ("_allgather_base", "_get_backend", "_reduce_scatter_base")
"""Operations of a process group that torch calls only by these private names."""

own_buffers: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
"""A module's own buffers by name, None included: `named_buffers` leaves out those that `forward`
has yet to make."""

PARAMETER_CLONE: Any = torch._C.TensorBase.clone
"""The function that a `TorchFunctionMode` sees when `copy.deepcopy` copies a parameter."""

SET_BY_SCHEDULERS = ("step", "_opt_called")
"""The attributes that a scheduler gives its optimizer, whose class doesn't name them."""

SHARD_LIST_GLOBALS = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
)
"""(module, name) of all globals that a sharded checkpoint's metadata is pickled with."""


WRAPPERS_IN_NAMES = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""What activation checkpointing and `torch.compile` add to the names of parameters, and torch
leaves out of sharded states."""


def original_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module inside a wrapper of `torch.compile`; None if `module` is no wrapper.

    The wrapper has no public name for it, and its `state_dict` has a prefix in all names.
    """
    return getattr(module, "_orig_mod", None)


def uncompiled(module: Any) -> Any:
    """Return the module inside a wrapper of `torch.compile`; anything else as it is."""
    inside = original_module(module)
    return module if inside is None else inside


def send_buffers(model: DistributedDataParallel) -> None:
    """Have DDP send rank 0's buffers now, which it does by itself only before a forward pass.

    All ranks call this.
    """
    # A model may have DDP ignore its buffers, some or all.
    if model.broadcast_buffers and model.modules_buffers:
        model._sync_buffers()


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's writes so far, by which autograd notices them too."""
    return tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the versions of many tensors."""
    return [*map(_version_of, tensors)]


_version_of = attrgetter("_version")


def address_of(generator: torch.Generator) -> int:
    """Return where a generator is in memory: looking there is faster than asking for its state."""
    return int(generator._cdata)


def has_other_users(tensor: torch.Tensor) -> bool:
    """Return whether other tensors, or arrays, share a tensor's memory."""
    storage = tensor.untyped_storage()
    # One is the tensor itself, and one `storage`.
    return torch._C._storage_Use_Count(storage._cdata) > 2


def mark_unwritten(tensor: torch.Tensor) -> bool:
    """Have `is_unwritten` see writes to a tensor, also through `.data`, which changes no version.

    The tensor's memory becomes copy-on-write, without a copy: the first write ends that.

    Returns:
        False if its memory isn't torch's own, or it is sparse.
    """
    if tensor.layout is not torch.strided:
        return False
    try:
        torch._lazy_clone(tensor)
    except RuntimeError:
        return False
    return True


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return whether nothing has written to a tensor since `mark_unwritten`."""
    return torch._C._is_cow_tensor(tensor)


@contextmanager
def compiled_by_shape() -> Iterator[None]:
    """Have code of `torch.compile` depend on a call's shapes alone, in a block of code.

    By itself torch compiles the second size of a dimension for all sizes, also for one that it has
    compiled before; it chooses kernels by their times; and after eight sizes it compiles no more.
    So the last bits would depend on earlier calls, which other ranks or attempts haven't made.
    `torch.compiler` has no names for these settings.

    In the block more than 64 compilations of one function raise an error.
    """
    from torch._dynamo import config as tracing
    from torch._inductor import config as kernels

    limit = max(tracing.recompile_limit, 64)
    shapes = tracing.patch(
        automatic_dynamic_shapes=False, recompile_limit=limit, fail_on_recompile_limit_hit=True
    )
    with shapes, kernels.patch(deterministic=True):
        yield


def has_communication_hook(model: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a hook averages a DDP model's gradients. Only registering one is public."""
    return bool(model._comm_hooks)


def hook_states(model: torch.nn.parallel.DistributedDataParallel) -> list[Any]:
    """Return what a DDP model's communication hooks keep from step to step, as far as can be seen.

    So does an object whose method a hook is, and what the hook's closure or `partial` holds.
    States of torch's private classes belong to DDP's own hooks, and keep nothing.
    """
    return [
        each
        for each in _reached_by_hooks(model)
        if not isinstance(each, _WITHOUT_STATE)
        and not (type(each).__name__.startswith("_") and type(each).__module__.startswith("torch."))
    ]


def averages_nothing(model: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether torch's hook for measurements leaves each rank its own gradients."""
    return any(each is noop_hook for each in _reached_by_hooks(model))


def _reached_by_hooks(model: torch.nn.parallel.DistributedDataParallel) -> list[Any]:
    """Return a model's communication hooks, their states, and what the functions in them hold."""
    reached: dict[int, Any] = {}
    to_see: list[Any] = [*chain.from_iterable(model._comm_hooks)]
    while to_see:
        each = to_see.pop()
        if id(each) in reached:
            continue
        reached[id(each)] = each
        match each:
            case FunctionType():
                # A variable that is yet to be set has an empty cell.
                cells = each.__closure__ or ()
                to_see += [cell.cell_contents for cell in cells if cell != CellType()]
            case MethodType():
                to_see += [each.__self__, each.__func__]
            case BuiltinMethodType():
                to_see.append(each.__self__)
            case partial():
                to_see += [each.func, *each.args, *each.keywords.values()]
    return [*reached.values()]


_WITHOUT_STATE = (
    *(FunctionType, MethodType, BuiltinMethodType, partial, ModuleType, type, type(None)),
    dist.ProcessGroup,
)


def note_synchronization(model: torch.nn.parallel.DistributedDataParallel, _: Any) -> None:
    """Note whether DDP is to average the gradients of a forward pass: a hook before each.

    DDP decides it there, not in the backward pass, and only if gradients are recorded. It keeps
    that in its reducer, which can't be asked. The hook of a model that is copied is no closure.
    """
    if torch.is_grad_enabled():
        averages = model.require_backward_grad_sync
        # In each step: setting an attribute of a module takes ten times as long as a look at it.
        if getattr(model, "averages_last_pass", None) is not averages:
            model.averages_last_pass = averages


def is_unsynchronized(model: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether DDP doesn't average the gradients of a model's last forward pass.

    Args:
        model: `note_synchronization` is called before its forward passes.
    """
    # Accelerate's `trigger_sync_in_backward` sets DDP's own mark after forward passes in `no_sync`.
    # A pass without gradients, as in an evaluation, removes it.
    averages = getattr(model, "averages_last_pass", False)
    return not (averages or model.require_forward_param_sync)


def saves_plainly(module: torch.nn.Module) -> bool:
    """Return whether the state of a module, not of those in it, is its parameters and buffers.

    Modules with another state replace one of these methods, mostly the one without a public name.
    """
    kind, base = type(module), torch.nn.Module
    return (
        kind._save_to_state_dict is base._save_to_state_dict
        and kind.get_extra_state is base.get_extra_state
        and kind.state_dict is base.state_dict
    )


def replace_backward_engine(make: Callable[[Any], Any]) -> None:
    """Replace the function that runs all backward passes in this process.

    `make` gets it, and returns its replacement. `torch.autograd.grad` calls it too. Replacing that
    name would miss scripts that imported it.
    """
    module: Any = torch.autograd
    module._engine_run_backward = make(module._engine_run_backward)


def backward_pass() -> int:
    """Return the number of the current backward pass; hooks don't get it."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass, as DDP does; there is no hook."""
    Variable._execution_engine.queue_callback(callback)


def default_store() -> dist.Store:
    """Return the store of the default process group; the script may have made it."""
    return distributed_c10d._get_default_store()


def process_groups() -> Any:
    """Return torch's registry of process groups, with the counter that names new ones."""
    return distributed_c10d._world


def operations_launched() -> int:
    """Return how many operations of the default group this rank has launched.

    Only the group counts them: users call torch's functions themselves.
    """
    return int(dist.group.WORLD._get_sequence_number_for_group())


def timeout_of(group: Any) -> Any:
    """Return the timeout of a gloo group, for another group."""
    return group._get_backend(torch.device("cpu")).options._timeout


def work_of(future: Any) -> dist.Work:
    """Return a work object that a future completes.

    A Python subclass of `Work` won't do: DDP may use it after Python has released it.
    """
    return _create_work_from_future(future)


def clear_mesh_caches() -> None:
    """Clear torch's cache of sharding results for operations on sharded tensors.

    A cached result has the device mesh of its operation, with the names of process groups. A later
    mesh of the same process compares equal, even if its groups have different names.
    """
    if "torch.distributed.tensor._api" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def makes_state() -> bool:
    """Return whether an optimizer takes a step only to make its state, before one is loaded.

    torch says so nowhere: `torch.distributed.checkpoint.state_dict` calls `step()` for it.
    """
    loading = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if loading is None:
        return False
    code = loading._init_optim_state.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def fsdp_state(module: Any) -> Any:
    """Return FSDP2's state of a module. Its methods are hooks that can't be copied."""
    return module._get_fsdp_state()


def fsdp_groups(module: Any) -> list[Any]:
    """Return FSDP2's groups of a module's parameters: versions keep one, or a list of them."""
    return [each for each in tree_leaves(vars(fsdp_state(module))) if hasattr(each, "fsdp_params")]


def holds_gradients(group: Any) -> bool:
    """Return whether FSDP2 has gradients of a group that are in no parameter's `grad` yet.

    It adds them up after `set_requires_gradient_sync(False)`, in another type if it averages them
    in that, and on each rank of a node after `set_requires_all_reduce(False)`.
    """
    return group._partial_reduce_output is not None or any(
        each.unsharded_accumulated_grad is not None
        # There is none before the first forward pass.
        or getattr(getattr(each, "_unsharded_param", None), "grad", None) is not None
        for each in group.fsdp_params
    )


class Accelerated:
    """Objects that an `accelerate.Accelerator` has prepared; it has no public names for them."""

    def __init__(self, accelerator: Any) -> None:
        self.models: list[Any] = accelerator._models
        self.optimizers: list[Any] = accelerator._optimizers
        self.schedulers: list[Any] = accelerator._schedulers
        self.registered: list[Any] = accelerator._custom_objects
        self.loaders: list[Any] = accelerator._dataloaders


def replace_iteration(kind: Any, iterate: Callable[[Any, Any], Any]) -> None:
    """Replace how loaders of a class of Accelerate's are iterated over: there is no hook.

    Args:
        kind: the class. Its instances are made before anybody could pass another one.
        iterate: gets the class's `__iter__` and a loader, and returns an iterator.
    """
    own = kind.__iter__

    def __iter__(loader: Any) -> Any:
        return iterate(own, loader)

    kind.__iter__ = __iter__


def copied_loader(loader: Any, **attributes: Any) -> Any:
    """Return a copy of a data loader with other attributes, which loaders refuse to set.

    Its class stays: a loader may have a state. The iterator that it keeps has no public name.
    Accelerate's loaders iterate over another one, which is copied in their place.
    """
    copied = copy(getattr(loader, "base_dataloader", loader))
    vars(copied).update(attributes, _iterator=None)
    return copied


def deepspeed_config(engine: Any) -> Any:
    """Return a DeepSpeed engine's configuration; there is no public way to change it later."""
    return engine._config


def drop_events(writer: Any, step: int) -> None:
    """Have a `SummaryWriter` of torch or tensorboardX drop events of this step and later ones.

    The writer's public methods write only some kinds of events.
    """
    if type(writer).__module__.startswith("tensorboardX"):
        from tensorboardX.proto import event_pb2
    else:
        from tensorboard.compat.proto import event_pb2
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    writer._get_file_writer().add_event(event_pb2.Event(session_log=start), step)
