"""Digests of what `TrainingState` holds, tensor by tensor, for `RunConfig(digests=…)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

from polytrain_torch.checkpoints.rank_parts import digest
from polytrain_torch.checkpoints.sharded_parts import is_consolidated, is_sharded
from polytrain_torch.models.parallel import unwrapped

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
            if not (is_sharded(part) or is_consolidated(part)):
                found.update(_of(name, unwrapped(part).state_dict()))
    return found


def _of(name: str, state: Any) -> Iterator[tuple[str, str]]:
    if isinstance(state, Mapping):
        for key, inner in state.items():
            yield from _of(f"{name}/{key}", inner)
    else:
        yield name, digest(state).hex()[:_DIGITS]
