"""State that differs by rank, in checkpoints: found by digests, stored per rank, or merged.

Rank 0's files hold its whole state. Every other rank has a file with only the states that differ
between ranks.
"""

from __future__ import annotations

import gc
import hashlib
import io
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from polytrain import get_context
from polytrain.extension import record_exactness
from polytrain_torch.checkpoints.safe_serialization import loaded, refuse_unsafe_file, save_safely
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.models.parallel import models_in_ddp, unwrapped

States = dict[str, dict[str, Any]]
"""Kind → name → state; for example "progress" → "epoch" → 3."""

Differences = dict[str, Any]
""""ranks" → number of ranks that saved; "names" → kind → names of states that differed."""

CHANGES = "changes"
"""Key of a rank's own states: names of parts of which it has only what may differ from rank 0's."""

_FOUND_FILE = "differs.pt"


def file_of(rank: int) -> str:
    """Return the name of the file with a rank's own states in a checkpoint."""
    return f"own-{rank}.pt"


def differences(states: States, *, equal: Collection[str] = ()) -> Differences:
    """Compare all ranks' states by digests. All ranks call this, with the same kinds.

    Args:
        states: this rank's states. They are copied only to hash them.
        equal: names of parts that must not differ.

    Raises:
        RuntimeError: one of these differs.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return {"ranks": 1, "names": {}}
    by_rank = gathered(digests_of(states))
    found = differences_of(by_rank)
    for name in sorted(set(equal).intersection(found["names"].get("parts", ()))):
        digests = [each.get(("parts", name)) for each in by_rank]
        other = next(n for n in range(ranks) if digests[n] != digests[0])
        record_exactness(f"rank {other} has had another {name!r} than rank 0")
        raise _drifted(name, other)
    return found


Digests = dict[tuple[str, str], bytes]
"""Kind and name → digest of the state."""


def digests_of(states: States) -> Digests:
    """Return the digests of one rank's states."""
    return {
        (kind, name): digest(state)
        for kind, by_name in states.items()
        for name, state in by_name.items()
    }


def differences_of(by_rank: Sequence[Digests]) -> Differences:
    """Return which of all ranks' states differ."""
    names: dict[str, list[str]] = {}
    for kind, name in sorted(set().union(*by_rank)):
        if len({each.get((kind, name)) for each in by_rank}) > 1:
            names.setdefault(kind, []).append(name)
    return {"ranks": len(by_rank), "names": names}


def _drifted(name: str, rank: int) -> RuntimeError:
    return RuntimeError(
        f"{name}: rank {rank} has another state than rank 0, which never happens with virtual "
        "workers. A parameter may be trained that no prepared model has, or by gradients that were "
        "computed outside of the loop over micro_batches(…); or a buffer may have changed outside "
        "of it; or a rank computes wrongly."
    )


def comparable(part: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part's state without the buffers that DDP broadcasts from rank 0 in each step.

    With virtual workers it broadcasts none, and all ranks' buffers must be equal.
    """
    if not isinstance(part, torch.nn.Module) or next(part.buffers(), None) is None:
        return state
    inside = set(part.modules())
    senders = {each for each in inside if each in models_in_ddp} or {
        each.module
        for each in ddp_models()
        if each.broadcast_buffers
        and not getattr(each, "is_virtual", False)
        and (each in inside or each.module in inside)
    }
    sent = {id(buffer) for each in senders for buffer in each.buffers()}
    buffers = unwrapped(part).named_buffers(remove_duplicate=False)
    left_out = {name for name, buffer in buffers if id(buffer) in sent}
    return {name: each for name, each in state.items() if name not in left_out}


def ddp_models() -> Iterable[DistributedDataParallel]:
    """Return all DDP models of this process; a module doesn't know the DDP model around it."""
    kinds = set(_with_subclasses(DistributedDataParallel))
    # By type: reading `__class__` of some objects imports modules. `issubclass` of an abstract
    # class would take ten times as long, for each of many objects.
    return (each for each in gc.get_objects() if type(each) in kinds)


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def save_own(states: States, found: Differences, directory: Path | None) -> None:
    """Write the states that differ, for every rank but rank 0. All ranks call this.

    Args:
        states: all states of this rank.
        found: from `differences`.
        directory: this rank's part of the checkpoint; None if it has none. Rank 0's gets the
            files of all ranks, unless every rank writes.

    Raises:
        TypeError: a state isn't plain data, and couldn't be loaded safely.
    """
    if not found["names"]:
        return
    rank = dist.get_rank()
    if get_context().every_rank_writes():
        assert directory is not None
        write_own(states, found, directory)
    elif rank:
        file = io.BytesIO()
        torch.save(_chosen(states, found), file)
        file.seek(0)
        refuse_unsafe_file(file)
        dist.send_object_list([file.getvalue()], dst=0)
    else:
        assert directory is not None
        # One after the other: rank 0 holds only one in memory.
        for other in range(1, found["ranks"]):
            received: list[Any] = [None]
            dist.recv_object_list(received, src=other)
            (directory / file_of(other)).write_bytes(received[0])


def write_own(states: States, found: Differences, directory: Path, rank: int | None = None) -> None:
    """Write a rank's states that differ, by default this rank's, unless it is rank 0.

    Raises:
        TypeError: a state isn't plain data, and couldn't be loaded safely.
    """
    rank = dist.get_rank() if rank is None else rank
    if found["names"] and rank:
        save_safely(_chosen(states, found), directory / file_of(rank))


def save_beside(states: States, compared: States, directory: Path | None) -> None:
    """Write the states that differ beside a library's checkpoint. All ranks call this.

    Args:
        compared: `states` without values that are allowed to differ.
        directory: this rank's part of the checkpoint; None if it has none.
    """
    found = differences(compared)
    save_own(states, found, directory)
    if dist.get_rank() == 0 and directory is not None:
        write_found(found, directory)


def write_found(found: Differences, directory: Path) -> None:
    """Write which states differ beside a library's checkpoint, if any does."""
    if found["names"]:
        save_safely(found, directory / _FOUND_FILE)


def found_beside(directory: Path) -> Differences | None:
    """Return the differences that `write_found` stored; None if there were none."""
    file = directory / _FOUND_FILE
    found: Differences | None = loaded(file) if file.exists() else None
    return found


def own_beside(states: States, directory: Path) -> States:
    """Return this rank's states that `save_beside` stored, or the given ones of rank 0."""
    found = found_beside(directory)
    return states if found is None else own_states(states, found, directory)


def own_states(states: States, found: Differences, directory: Path) -> States:
    """Return this rank's states, or the given ones of rank 0 if another number of ranks saved."""
    if not found["names"] or not dist.get_rank() or found["ranks"] != dist.get_world_size():
        return states
    own = loaded(directory / file_of(dist.get_rank()))
    return {
        kind: {
            **{
                name: state
                for name, state in by_name.items()
                if name not in found["names"].get(kind, ())
            },
            **{name: _whole(own, kind, name, by_name.get(name)) for name in own.get(kind, ())},
        }
        for kind, by_name in states.items()
    }


def states_of_all(
    kind: str, name: str, first: Any, found: Differences, directory: Path
) -> list[Any]:
    """Return all ranks' states of a part that differs, by rank. `first` is rank 0's."""
    others = (loaded(directory / file_of(rank)) for rank in range(1, found["ranks"]))
    return [first, *(_whole(each, kind, name, first) for each in others)]


def _whole(own: Mapping[str, Any], kind: str, name: str, first: Any) -> Any:
    """Return the whole state of a part, of a rank with these states of its own."""
    is_change = kind == "parts" and name in own.get(CHANGES, ())
    return {**first, **own[kind][name]} if is_change else own[kind][name]


def refuse_other_ranks(names: Iterable[str], found: Differences) -> None:
    """Refuse per-rank states that another number of ranks has saved.

    Raises:
        ValueError: there are such states; the message names them.
    """
    listed = ", ".join(names)
    ranks, now = found["ranks"], dist.get_world_size()
    if listed and ranks != now:
        raise ValueError(
            f"{listed}: each of the {ranks} workers that made the checkpoint had a state of its "
            f"own, and there are {now} now. Resume with ScalingConfig(num_workers={ranks}); or "
            "make it the same on all ranks before it is saved, for example by "
            "torch.distributed.all_reduce; or, in TrainingState, pass a part that has a method "
            "load_state_dicts(states), which gets the states of all ranks and merges them."
        )


def keep_metric(part: Any) -> None:
    """Have a torchmetrics metric save its values; by default it doesn't."""
    if isinstance(part, torch.nn.Module) and callable(getattr(part, "persistent", None)):
        part.persistent(True)


def _chosen(states: States, found: Differences) -> States:
    return {
        kind: {name: states[kind][name] for name in names if name in states[kind]}
        for kind, names in found["names"].items()
    }


def _is_plain(state: Any) -> bool:
    """Whether a state is a tensor whose bytes are its values."""
    return (
        type(state) in (torch.Tensor, torch.nn.Parameter)
        and state.layout is torch.strided
        and not (state.is_meta or state.is_quantized)
    )


def digest(state: Any) -> bytes:
    """Return a digest that is equal for equal states, even if their pickles differ."""
    found = hashlib.sha1(usedforsecurity=False)
    _add(found.update, state)
    return found.digest()


def _checksum(values: Any) -> bytes:
    """Return a CRC-32: eight times as fast as a hash, and enough where nobody forges states."""
    return zlib.crc32(values).to_bytes(4, "little")


def _add(update: Callable[[Any], None], state: Any) -> None:
    """Add a state to a digest."""
    if _is_plain(state):
        update(f"tensor {state.dtype} {tuple(state.shape)}".encode())
        whole = state.detach().cpu().resolve_conj().resolve_neg().contiguous()
        update(_checksum(whole.reshape(-1).view(torch.uint8).numpy()))
    elif isinstance(state, np.ndarray) and not state.dtype.hasobject:
        update(f"array {state.dtype} {state.shape}".encode())
        update(_checksum(np.ascontiguousarray(state).reshape(-1).view(np.uint8)))
    elif isinstance(state, Mapping):
        update(f"mapping {len(state)}".encode())
        for key in sorted(state, key=repr):
            _add(update, key)
            _add(update, state[key])
    elif isinstance(state, list | tuple):
        update(f"sequence {len(state)}".encode())
        for each in state:
            _add(update, each)
    elif isinstance(state, set | frozenset):
        _add(update, sorted(state, key=repr))
    elif state is None or isinstance(state, bool | int | float | complex | str | bytes):
        update(f"{type(state).__name__} {state!r};".encode())
    else:
        file = io.BytesIO()
        torch.save(state, file)
        update(file.getbuffer())
