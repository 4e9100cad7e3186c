"""The types of numbers in an optimizer's state, which torch doesn't restore."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def restore_types(
    optimizer: torch.optim.Optimizer, states: Iterable[tuple[torch.Tensor, Mapping[str, Any]]]
) -> None:
    """Give a state that was loaded the types that it was saved with.

    torch casts all of it to each parameter's type. So `NAdam` of float64 parameters would multiply
    its product in float64 from there on, and moments in float32 for bfloat16 parameters would be
    rounded.

    Args:
        optimizer: it has loaded the state.
        states: parameters, which had the types that they have now, and the state of each.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        # It may cast by itself.
        return
    for parameter, saved in states:
        state = optimizer.state.get(parameter, {})
        for name, value in saved.items():
            own = state.get(name)
            # A class of torch's makes a tensor of a number that a subclass counts with.
            are_tensors = isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor)
            # Of what is sharded now, a whole one may have been saved.
            are_alike = isinstance(own, DTensor) == isinstance(value, DTensor)
            if are_tensors and are_alike and own.dtype != value.dtype:
                state[name] = value.to(own.device, copy=True)


def numbered_states(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, Mapping[str, Any]]]:
    """Yield the parameters that have a state in `saved`, which numbers them, and that state."""
    for group, mine in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for number, parameter in zip(group["params"], mine["params"], strict=True):
            if number in saved["state"]:
                yield parameter, saved["state"][number]


def have_same_types(parts: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether all modules have weights of the types that were saved.

    Args:
        parts: the modules, and other parts, by name.
        saved: their states by name, or of some of them.
    """
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            mine = dict(part.named_parameters())
            for key, value in saved.get(name, {}).items():
                if key in mine and mine[key].dtype != value.dtype:
                    return False
    return True
