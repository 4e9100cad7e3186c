"""The buffers of models as they were at a moment, to set them again or send rank 0's.

`forward` may assign a buffer, which makes another tensor of it, or may make one that wasn't there.
So buffers are found by module and name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from polytrain_torch.collectives.gathering import from_rank_0
from polytrain_torch.private import own_buffers

if TYPE_CHECKING:
    from polytrain_torch.collectives.node_group import NodeGroup

_Named: TypeAlias = Mapping[str, torch.Tensor | None]

_CPU = torch.device("cpu")


class Buffers:
    """The buffers of models as they are now."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        modules = chain.from_iterable(model.modules() for model in models)
        self._modules = [*dict.fromkeys(modules)]
        self._kept = [{**own_buffers(module)} for module in self._modules]
        self._values = [each.detach().clone() for each in _tensors(self._kept)]

    @torch.no_grad()
    def reset(self) -> None:
        """Set all buffers again: the same tensors, with the same values."""
        for module, kept in zip(self._modules, self._kept, strict=True):
            _set(module, kept)
        for buffer, value in zip(_tensors(self._kept), self._values, strict=True):
            buffer.copy_(value)

    @torch.no_grad()
    def send(self, on_node: NodeGroup | None = None) -> None:
        """Set the buffers of all ranks to rank 0's, those on the CPU by `on_node` if it is given.

        All ranks call this. When this object was made, they had the same buffers.
        """
        now = [{**own_buffers(module)} for module in self._modules]
        if not any(self._kept) and not any(now):
            return
        is_first = dist.get_rank() == 0
        is_other = is_first and [*map(_layout, now)] != [*map(_layout, self._kept)]
        if not is_first:
            self.reset()
        # One message of a length that all ranks know; its first byte says if another one follows.
        chosen = [*_tensors(now if is_first and not is_other else self._kept)]
        device = self._device()
        parts = [each.detach().reshape(-1).view(torch.uint8).to(device) for each in chosen]
        flag = torch.tensor([is_other], dtype=torch.uint8, device=device)
        flat = torch.cat([flag, *parts])
        dist.broadcast(flat, src=0, group=on_node if device == _CPU else None)
        if bool(flat[0]):
            self._send_objects(now)
        elif not is_first:
            _, *received = flat.split([1, *(each.nbytes for each in chosen)])
            for buffer, part in zip(chosen, received, strict=True):
                # A copy: a part may begin at an address that the type can't have.
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _send_objects(self, now: list[dict[str, torch.Tensor | None]]) -> None:
        """Send rank 0's buffers, of whatever names, types and shapes."""
        is_first = dist.get_rank() == 0
        sent = [
            {name: None if each is None else each.detach().to(_CPU) for name, each in named.items()}
            for named in (now if is_first else ())
        ]
        received: list[dict[str, torch.Tensor | None]] = from_rank_0(sent)
        if not is_first:
            device = self._device()
            for module, named in zip(self._modules, received, strict=True):
                _set(
                    module,
                    {n: None if each is None else each.to(device) for n, each in named.items()},
                )

    def _device(self) -> torch.device:
        of_modules = (module.parameters(recurse=False) for module in self._modules)
        tensors = chain(_tensors(self._kept), chain.from_iterable(of_modules))
        return next((each.device for each in tensors), _CPU)


def _set(module: torch.nn.Module, named: _Named) -> None:
    """Have the module have these buffers, and no others."""
    own = own_buffers(module)
    for name in [name for name in own if name not in named]:
        delattr(module, name)
    for name, buffer in named.items():
        if own.get(name) is not buffer:
            own[name] = buffer


def _tensors(of_modules: Iterable[_Named]) -> Iterator[torch.Tensor]:
    return (each for named in of_modules for each in named.values() if each is not None)


def _layout(named: _Named) -> list[object]:
    return [
        (name, None if each is None else (each.dtype, each.shape)) for name, each in named.items()
    ]
