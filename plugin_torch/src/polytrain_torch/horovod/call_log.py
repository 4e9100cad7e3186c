"""Logs all ranks' collective calls in the store, so that ranks can compare their calls.

Horovod matches operations by name. Here ranks make them in the same order, and the first rank that
makes a call logs it. A rank that makes a different call gets an error instead of hanging, and a
rank that has joined reads which calls it has to take part in.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from polytrain import heartbeat
from polytrain_torch.private import default_store

Call = tuple[Any, ...]
"""The function's name, then the arguments that must be equal on all ranks, as plain values."""

_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-5, 0.005


@dataclass
class _Log:
    """What this rank knows of the calls since `begin`."""

    store: dist.Store
    number: int = 0
    """Number of this rank's last call."""

    forgotten: int = 0
    """Number of the last call that rank 0 has deleted."""


_log: _Log | None = None
"""None while there are no other ranks to compare with."""

_times_begun = 0
"""Number of logs in this process, so that keys of an earlier `init` aren't read again."""


def begin() -> None:
    """Begin to log calls in the current process group. All ranks call this."""
    global _log, _times_begun
    _log = None
    if dist.get_world_size() > 1:
        _times_begun += 1
        _log = _Log(dist.PrefixStore(f"horovod {_times_begun}", default_store()))


def end() -> None:
    """Stop logging calls."""
    global _log
    _log = None


def log_call(*call: Any) -> int:
    """Compare this rank's next call with the other ranks'; return its number.

    Raises:
        RuntimeError: another rank makes a different call.
    """
    if _log is None:
        return 0
    _log.number += 1
    mine = json.dumps([dist.get_rank(), *call])
    # The first rank's call is stored; the others get it.
    first = json.loads(_log.store.compare_set(str(_log.number), "", mine))
    if first[1:] != json.loads(mine)[1:]:
        raise RuntimeError(
            f"rank {dist.get_rank()} calls {_text(call)}, and rank {first[0]} "
            f"{_text(first[1:])}: all ranks must make the same calls, in the same order."
        )
    return _log.number


def completed(number: int) -> None:
    """Note that all ranks have logged the call with this number, because it is done."""
    if _log is None or dist.get_rank() != 0:
        return
    while _log.forgotten < number:
        _log.forgotten += 1
        _log.store.delete_key(str(_log.forgotten))


def next_call() -> Call:
    """Wait until another rank logs its next call, and return it."""
    assert _log is not None
    _log.number += 1
    key, nap_s = str(_log.number), _SHORTEST_NAP_S
    while not _log.store.check([key]):
        # The store's own wait would block the connection for other threads.
        time.sleep(nap_s)
        nap_s = min(nap_s * 2, _LONGEST_NAP_S)
        heartbeat()
    return tuple(json.loads(_log.store.get(key))[1:])


def count(event: str) -> int:
    """Count an event over all ranks; return the count so far."""
    assert _log is not None
    return int(_log.store.add(event, 1))


def _text(call: Call) -> str:
    function, *others = call
    return f"hvd.{function}({', '.join(map(str, others))})"
