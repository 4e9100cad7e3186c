"""Keeps a run's zygote for the next run of the same process.

In a notebook, or to compare settings, `fit()` is called several times. A kept zygote has imported
the modules for workers. At most one is kept, on the driver's node, for a minute; it ends with the
process. A run that needs a different zygote, or one with other code, ends it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from polytrain.linux.processes import umask
from polytrain.workers.processes.client import ZygoteConnection, ZygoteSpec, zygote_name

_KEPT_S = 60.0

_OF_NO_EFFECT = ("RAY_", "PYTEST_", "POLYTRAIN_")
"""Prefixes of variables that may differ; pytest, for one, sets one to the name of each test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptZygote:
    """A zygote on the driver's node, and the connection that keeps it alive."""

    token: str
    """Identifies the zygotes of its run on every node."""

    connection: ZygoteConnection
    reuse_key: tuple[str, ZygoteSpec, Mapping[str, str], Sequence[str], int]
    """Node, modules, environment, installed versions and umask, on which the zygote depends besides
    editable code files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    zygote: KeptZygote
    timer: threading.Timer


_lock = threading.Lock()
_kept: _Kept | None = None


def kept_or_new_zygote(spec: ZygoteSpec, node_id: str) -> KeptZygote:
    """Return the kept zygote if node, modules and environment are the same, or start one.

    Args:
        spec: the zygote's settings, without a name.
        node_id: the driver's node.
    """
    reuse_key = node_id, spec, _relevant_variables(), sorted(_installed(spec.path)), umask()
    kept = _taken()
    if kept is not None:
        if kept.reuse_key == reuse_key and kept.connection.is_current():
            return kept
        kept.connection.end()
    token = secrets.token_hex(8)
    connection = ZygoteConnection.open(replace(spec, name=zygote_name(token, node_id)))
    return KeptZygote(token=token, connection=connection, reuse_key=reuse_key)


def _relevant_variables() -> dict[str, str]:
    """Return the variables that imports may depend on."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_NO_EFFECT)}


def _installed(path: Sequence[str]) -> Iterator[str]:
    """Yield identifiers of the distributions that are installed in these directories."""
    for directory in path:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                # The name contains the version; reinstalling changes the time.
                if entry.name.endswith((".dist-info", ".egg-info", ".pth")):
                    yield f"{directory} {entry.name} {entry.stat().st_mtime_ns}"


def keep(zygote: KeptZygote) -> None:
    """Keep the zygote for the next run. No other run may be using it."""
    global _kept
    before = _taken()
    if before is not None:
        before.connection.end()
    with contextlib.suppress(OSError):
        # The next run must not get this run's preloaded modules.
        zygote.connection.request(["reset"])
    timer = threading.Timer(_KEPT_S, let_go)
    timer.name, timer.daemon = "polytrain-kept-zygote", True
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


def _taken() -> KeptZygote | None:
    global _kept
    with _lock:
        kept, _kept = _kept, None
    if kept is None:
        return None
    kept.timer.cancel()
    return kept.zygote


def _forget_in_fork() -> None:
    """Forget the kept zygote in a forked child, which has no connection to it."""
    global _lock, _kept
    # Replace the lock: another thread of the driver may have held it.
    _lock, _kept = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_in_fork)
