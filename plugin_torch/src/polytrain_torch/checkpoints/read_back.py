"""Loads the first checkpoint on trial, so that one that can't be loaded fails the run early.

The states are loaded into copies without values, on torch's meta device: that doesn't touch
training, and needs no memory.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from polytrain import CheckpointError
from polytrain_torch.checkpoints.rank_parts import ddp_models
from polytrain_torch.models.parallel import own_class
from polytrain_torch.private import (
    PARAMETER_CLONE,
    SET_BY_SCHEDULERS,
    fsdp_state,
    hook_states,
    tree_map,
)

logger = logging.getLogger(__name__)

_loaded_back: WeakSet[Any] = WeakSet()
"""Owners that have saved or loaded a checkpoint in this process."""


def is_first_save(owner: Any) -> bool:
    """Whether a save is the first of its owner, such as a trainer, and needs a trial load.

    Later calls return False.
    """
    is_first = owner not in _loaded_back
    _loaded_back.add(owner)
    return is_first


def has_loaded(owner: Any) -> None:
    """Note that an owner has loaded a checkpoint: its saves need no trial load."""
    _loaded_back.add(owner)


def warn_of_hooks(parts: Collection[Any]) -> None:
    """Warn of what a communication hook of DDP keeps, and none of the parts has."""
    held = {id(each) for part in parts for each in (part, *getattr(part, "__dict__", {}).values())}
    for state in chain.from_iterable(map(hook_states, ddp_models())):
        # Numbers and texts that a hook's closure holds are settings, mostly.
        if id(state) not in held and not isinstance(state, int | float | str | bytes):
            logger.warning(
                "A communication hook of DDP has a %s, and no checkpoint has that: after a restart "
                "the hook begins anew, and the weights become others. To restore it, pass "
                "TrainingState an object that has it as an attribute, and saves and loads its "
                "content in state_dict and load_state_dict.",
                type(state).__qualname__,
            )


def copy_without_values(part: Any, *, keeping: Iterable[Any] = ()) -> Any:
    """Return a copy of a part with tensors on the meta device; None if that is impossible.

    The copy shares the objects in `keeping` with the part.
    """
    shared = {id(each): each for each in keeping}
    try:
        with _WithoutValues():
            if _is_custom_optimizer(part):
                return _copied_optimizer(part, shared)
            return copy.deepcopy(part, shared) if _is_copied_whole(part) else None
    except Exception:
        return None


def whole_copies_without_values(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return unsharded copies, on the meta device, of sharded models and their optimizers.

    Those that can't be copied are left out.
    """
    shared: dict[int, Any] = {}
    copies: dict[str, Any] = {}
    models = {name: each for name, each in parts.items() if isinstance(each, torch.nn.Module)}
    with _WithoutValues():
        # Models first: the copied optimizers train the parameters of the copied models.
        for name, part in {**models, **parts}.items():
            try:
                is_model = name in models
                copies[name] = (
                    _copied_module(part, shared) if is_model else _copied_optimizer(part, shared)
                )
            except Exception:
                continue
    return copies


def state_without_values(state: Any) -> Any:
    """Return a copy of a state with unsharded tensors on the meta device."""
    with _WithoutValues():
        return copy.deepcopy(state)


def with_whole_shards(state: Any) -> Any:
    """Return a state with whole tensors on the meta device in place of shards, as copies have."""
    shards: list[DTensor] = []

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        shards.append(value)
        return _whole_without_values(value)

    found = tree_map(whole, state)
    # A module's own state has an attribute with versions, which `found` lacks.
    return found if shards else state


def _copied_module(module: torch.nn.Module, shared: dict[int, Any]) -> Any:
    """Copy a module, without the FSDP classes in it: they refuse to be copied."""
    sharded = [each for each in module.modules() if isinstance(each, FSDPModule)]
    for each in sharded:
        shared[id(each)] = object.__new__(own_class(each))
        # FSDP's hooks are methods of its state, which can't be copied.
        state = fsdp_state(each)
        shared[id(state)] = state
    for each in sharded:
        vars(shared[id(each)]).update(copy.deepcopy(vars(each), shared))
    return copy.deepcopy(module, shared)


def _is_custom_optimizer(part: Any) -> bool:
    return isinstance(part, torch.optim.Optimizer) and not type(part).__module__.startswith(
        # torch's own optimizers are copied whole, or need collectives to load.
        ("torch.optim.", "torch.distributed.")
    )


def _copied_optimizer(part: torch.optim.Optimizer, shared: dict[int, Any]) -> Any:
    """Copy all attributes: torch's own copy of an optimizer lacks those of a subclass."""
    copied = object.__new__(type(part))
    shared[id(part)] = copied
    # A scheduler's step would be that of the part.
    own = {name: each for name, each in vars(part).items() if name not in SET_BY_SCHEDULERS}
    vars(copied).update(copy.deepcopy(own, shared))
    return copied


def _is_copied_whole(part: Any) -> bool:
    if isinstance(part, torch.nn.Module):
        # One rank alone can't copy these.
        return not any(isinstance(each, _OF_ALL_RANKS) for each in part.modules())
    kind = type(part)
    if kind.__module__.startswith("torch.optim."):
        return True
    # Objects with their own copy methods may lose attributes, and containers may be large.
    is_plain = all(getattr(kind, name, None) is getattr(object, name, None) for name in _OF_COPIES)
    return is_plain and not any(hasattr(part, name) for name in ("__getitem__", "__iter__"))


_OF_ALL_RANKS = (DistributedDataParallel, FullyShardedDataParallel)

_OF_COPIES = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")


Load = Callable[[Any], Any]
"""Loads a part's saved state into a copy of the part."""


def try_all(loads: Sequence[tuple[Any, Load]]) -> None:
    """Load saved states into copies of parts. A part's copy shares the other parts.

    Parts that can't be copied aren't tried.

    Raises:
        CheckpointError: a part can't be loaded.
    """
    for part, load in loads:
        others = [other for other, _ in loads if other is not part]
        copied = copy_without_values(part, keeping=others)
        if copied is not None:
            try_loading(type(part).__qualname__, partial(load, copied))


def try_shards(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Load the states of a sharded model and its optimizers into unsharded copies without values.

    Only all ranks together could load the shards themselves. Optimizers without a state aren't
    tried: torch would take a step to create it.

    Raises:
        CheckpointError: a part can't be loaded.
    """
    numbered = {f"optimizer {number}": each for number, each in enumerate(optimizers)}
    copies = whole_copies_without_values({"model": model, **numbered})
    copied = copies.get("model")
    if copied is None:
        return
    state = state_without_values(get_model_state_dict(model))
    try_loading(type(model).__qualname__, partial(set_model_state_dict, copied, state))
    for name, optimizer in numbered.items():
        if name in copies and optimizer.state:
            state = state_without_values(get_optimizer_state_dict(model, optimizer))
            load = partial(set_optimizer_state_dict, copied, copies[name], state)
            try_loading(type(optimizer).__qualname__, load)


def try_loading(name: str, load: Callable[[], Any]) -> None:
    """Load a part's state into a copy on trial.

    Raises:
        CheckpointError: the state can't be loaded; it names the part.
    """
    try:
        with warnings.catch_warnings():
            # Copying into the meta device does nothing, as intended.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            load()
    except Exception as error:
        if "meta" in str(error) and isinstance(error, (NotImplementedError, RuntimeError)):
            # Loading reads values that the copy doesn't have: the trial proves nothing.
            return
        raise CheckpointError(
            f"{name}: what was saved of it can't be loaded, so no restart could resume. Its "
            f"load_state_dict raised {type(error).__name__}: {error}. Mend its state_dict or "
            "load_state_dict (a module with get_extra_state needs set_extra_state), or leave it "
            "out of the checkpoint."
        ) from error


class _WithoutValues(TorchFunctionMode):
    """Makes `copy.deepcopy` copy tensors without their values."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.__deepcopy__:
            tensor, memo = args
            copied = _whole_without_values(tensor)
            memo[id(tensor)] = copied
            return copied
        if function is PARAMETER_CLONE:
            return torch.empty_like(args[0], device="meta")
        return function(*args, **(kwargs or {}))


def _whole_without_values(tensor: torch.Tensor) -> torch.Tensor:
    trained = tensor.requires_grad
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device="meta", requires_grad=trained)
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(copied, trained) if is_parameter else copied.requires_grad_(trained)
