"""Logs all ranks' collective calls in the store, so that ranks can compare their calls.

Horovod matches operations by name. Here ranks make them in the same order, and the first rank that
makes a call logs it. A rank that makes a different call gets an error instead of hanging, and a
rank that has joined reads which calls it has to take part in.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

from polytrain import heartbeat
from polytrain_torch.private import default_store

Call = tuple[Any, ...]
"""The function's name, then the arguments that must be equal on all ranks, as plain values."""

_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-5, 0.005


def begin() -> None:
    """Begin to log calls in the current process group. All ranks call this."""
    global _log
    _log = _CallLog() if dist.get_world_size() > 1 else None


def end() -> None:
    """Stop logging calls."""
    global _log
    _log = None


def log_call(*call: Any) -> int:
    """Compare this rank's next call with the other ranks'; return its number.

    Raises:
        RuntimeError: another rank makes a different call.
    """
    return 0 if _log is None else _log.log_call(call)


def completed(number: int) -> None:
    """Note that all ranks have logged the call with this number, because it is done."""
    if _log is not None:
        _log.forget_until(number)


def next_call() -> Call:
    """Wait until another rank logs its next call, and return it."""
    assert _log is not None
    return _log.next_call()


def count(event: str) -> int:
    """Count an event over all ranks; return the count so far."""
    assert _log is not None
    return _log.count(event)


class _CallLog:
    def __init__(self) -> None:
        global _times_begun
        _times_begun += 1
        self._store = dist.PrefixStore(f"horovod {_times_begun}", default_store())
        self._number = 0
        self._forgotten = 0

    def log_call(self, call: Call) -> int:
        self._number += 1
        mine = json.dumps([dist.get_rank(), *call])
        # The first rank's call is stored; the others get it.
        first = json.loads(self._store.compare_set(str(self._number), "", mine))
        if first[1:] != json.loads(mine)[1:]:
            raise RuntimeError(
                f"rank {dist.get_rank()} calls {_text(call)}, and rank {first[0]} "
                f"{_text(first[1:])}: all ranks must make the same calls, in the same order."
            )
        return self._number

    def next_call(self) -> Call:
        self._number += 1
        key, nap_s = str(self._number), _SHORTEST_NAP_S
        while not self._store.check([key]):
            # The store's own wait would block the connection for other threads.
            time.sleep(nap_s)
            nap_s = min(nap_s * 2, _LONGEST_NAP_S)
            heartbeat()
        return tuple(json.loads(self._store.get(key))[1:])

    def count(self, event: str) -> int:
        return int(self._store.add(event, 1))

    def forget_until(self, number: int) -> None:
        if dist.get_rank() != 0:
            return
        while self._forgotten < number:
            self._forgotten += 1
            self._store.delete_key(str(self._forgotten))


_log: _CallLog | None = None

_times_begun = 0
"""Number of logs in this process, so that keys of an earlier `init` aren't read again."""


def _text(call: Call) -> str:
    function, *others = call
    return f"hvd.{function}({', '.join(map(str, others))})"
