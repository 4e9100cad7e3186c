"""Keeps a run's zygote warm for the next run of the same process.

In a notebook, or to compare settings, `fit()` is called several times. A kept zygote has imported
what workers need. At most one is kept, on the driver's node, for a minute; it ends with the
process. A run that needs a different zygote, or one with other code, ends it. If there is a warm
zygote (`warm`), which other processes use too, the run uses that one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polytrain.linux.processes import umask
from polytrain.workers.processes.client import ZygoteConnection, ZygoteSpec, zygote_name
from polytrain.workers.processes.warm import (
    find,
    installed_versions,
    relevant_variables,
    start,
    warm_seconds,
    warm_token,
)

_KEPT_S = 60.0

_GETS_ADDRESS_WITHIN_S = 1.0
"""Seconds that a run waits for the address of warm zygotes before it does without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmZygote:
    """A zygote on the driver's node, and the connection that keeps it alive."""

    token: str
    """Identifies the zygotes of its run on every node."""

    connection: ZygoteConnection
    likeness: tuple[str, ZygoteSpec, Mapping[str, str], Sequence[str], int]
    """Node, modules, environment, installed versions and umask: what the zygote depends on, besides
    files of code that may be edited."""

    is_shared: bool = False
    """Whether other processes use it too, and it keeps itself alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    zygote: WarmZygote
    timer: threading.Timer


_lock = threading.Lock()
_kept: _Kept | None = None


def warm_zygote(spec: ZygoteSpec, node_id: str) -> WarmZygote:
    """Return the kept or a warm zygote with the same node, modules and environment, or start one.

    Args:
        spec: the zygote's settings, without a name.
        node_id: the driver's node.
    """
    variables, versions = relevant_variables(os.environ), installed_versions(spec.path)
    likeness = node_id, spec, variables, versions, umask()
    kept = _taken()
    if kept is not None:
        if kept.likeness == likeness and _is_usable(kept.connection):
            return kept
        kept.connection.end()
    shared = _shared(spec, node_id)
    if shared is not None:
        token = warm_token(spec.path)
        return WarmZygote(token=token, connection=shared, likeness=likeness, is_shared=True)
    token = secrets.token_hex(8)
    connection = ZygoteConnection.open(replace(spec, name=zygote_name(token, node_id)))
    return WarmZygote(token=token, connection=connection, likeness=likeness)


def _is_usable(kept: ZygoteConnection) -> bool:
    """Return whether it has nothing of the last run, and no code that was edited since."""
    if not kept.was_reset():
        return False
    held = kept.description()
    return held is not None and held.is_current


def _shared(spec: ZygoteSpec, node_id: str) -> ZygoteConnection | None:
    if spec.variables:
        # Its imports may have been different ones without these variables.
        return None
    found = find(spec, node_id)
    kept_s = warm_seconds(os.environ)
    if found is not None or kept_s is None:
        return found
    # Another zygote, with fewer modules or of another user, may have the address.
    with contextlib.suppress(OSError):
        other = ZygoteConnection.existing(zygote_name(warm_token(spec.path), node_id))
        if other is None:
            return start(spec, node_id, kept_s=kept_s, within_s=_GETS_ADDRESS_WITHIN_S)
        other.leave()
    return None


def keep(zygote: WarmZygote) -> None:
    """Keep the zygote for the next run. No other run may be using it, unless it is shared."""
    global _kept
    if zygote.is_shared:
        zygote.connection.leave()
        return
    before = _taken()
    if before is not None:
        before.connection.end()
    with contextlib.suppress(OSError):
        # The next run must not get what this run's training function imported.
        zygote.connection.request(["reset"])
    timer = threading.Timer(_KEPT_S, let_go)
    timer.daemon = True
    with _lock:
        _kept = _Kept(zygote=zygote, timer=timer)
    timer.start()


def let_go() -> None:
    """End the kept zygote, if there is one."""
    zygote = _taken()
    if zygote is not None:
        zygote.connection.end()


def kept_process() -> int | None:
    """Return the process id of the kept zygote, if this process started one."""
    with _lock:
        return None if _kept is None else _kept.zygote.connection.pid


def _taken() -> WarmZygote | None:
    global _kept
    with _lock:
        kept, _kept = _kept, None
    if kept is None:
        return None
    kept.timer.cancel()
    return kept.zygote


def _forget_in_fork() -> None:
    """Forget what the driver has: a forked child of it has no connections to zygotes."""
    global _lock, _kept
    # Another thread of the driver may have held the lock.
    _lock, _kept = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_in_fork)
