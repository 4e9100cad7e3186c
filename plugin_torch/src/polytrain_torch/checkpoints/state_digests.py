"""Digests of what `TrainingState` holds: of each tensor for the journal, and of all replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch

from polytrain.extension import compare_replicas
from polytrain_torch.checkpoints.rank_parts import Differences, ddp_models, digest
from polytrain_torch.checkpoints.sharded_parts import is_consolidated, is_flattened, is_sharded
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.models.parallel import unwrapped
from polytrain_torch.private import has_communication_hook

_holders: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Number → each living `TrainingState`, in the order in which they were made."""

_DIGITS = 16


def hold(state: Any) -> None:
    """Take digests of a `TrainingState`'s parts from now on."""
    _holders[max(_holders, default=0) + 1] = state


def digests_held() -> dict[str, str]:
    """Return part and name of each tensor → its digest.

    Parts of which this rank has only shards, or no state, are left out.
    """
    found: dict[str, str] = {}
    for _, holder in sorted(_holders.items()):
        for name, part in holder.parts.items():
            if not (is_sharded(part) or is_flattened(part) or is_consolidated(part)):
                found.update(_of(name, unwrapped(part).state_dict()))
    return found


def _of(name: str, state: Any) -> Iterator[tuple[str, str]]:
    if isinstance(state, Mapping):
        for key, inner in state.items():
            yield from _of(f"{name}/{key}", inner)
    else:
        yield name, digest(state).hex()[:_DIGITS]


def check_replicas(parts: Mapping[str, Any], found: Differences) -> None:
    """Compare the parameters and their optimizers' states, if parts differ. All ranks call this.

    A part may differ for other reasons, as by buffers that DDP doesn't send.

    Args:
        parts: the parts of a training state, by name.
        found: which of them differ.

    Raises:
        ReplicasDifferError: see `compare_replicas`.
    """
    differing = [parts[name] for name in found["names"].get("parts", ()) if name in parts]
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    if not any(isinstance(part, kinds) for part in differing):
        return
    # A hook may average otherwise, or later.
    models = [model for model in ddp_models() if not has_communication_hook(model)]
    alike = {
        id(parameter)
        for model in models
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    }
    mine = {
        name: digest(_alike(part, alike)) for name, part in parts.items() if isinstance(part, kinds)
    }
    by_rank = gathered(mine)
    names = [name for name in mine if len({each[name] for each in by_rank}) > 1]
    compare_replicas(
        [b"".join(each[name] for name in names) for each in by_rank],
        f"what DDP trains in {', '.join(map(repr, names))}",
    )


def _alike(part: torch.nn.Module | torch.optim.Optimizer, alike: set[int]) -> Any:
    """Return a part's tensors that belong to these parameters, given by their ids."""
    if isinstance(part, torch.nn.Module):
        named = unwrapped(part).named_parameters()
        return {name: each for name, each in named if id(each) in alike}
    trained = (each for group in part.param_groups for each in group["params"])
    return [part.state[each] for each in trained if id(each) in alike and each in part.state]
