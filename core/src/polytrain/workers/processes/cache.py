"""Keeps a run's zygote for the next run of the same process.

In a notebook, or to compare settings, `fit()` is called several times. A kept zygote has imported
the modules for workers. At most two are kept, on the driver's node, for a minute each: training and
predictions, or two backends, need different ones. They end with the process. A run that needs one
with other code ends it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polytrain.linux.processes import umask
from polytrain.workers.processes.zygote_connection import ZygoteConnection, ZygoteSpec, zygote_name

_KEPT_S = 60.0

_KEPT_AT_MOST = 2
"""Each has a framework in its memory."""

_OF_NO_EFFECT = ("RAY_", "PYTEST_", "POLYTRAIN_")
"""Prefixes of variables that may differ; pytest, for one, sets one to the name of each test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptZygote:
    """A zygote on the driver's node, and the connection that keeps it alive."""

    token: str
    """Identifies the zygotes of its run on every node."""

    connection: ZygoteConnection
    reuse_key: tuple[str, ZygoteSpec, Mapping[str, str], Sequence[str], Sequence[Any]]
    """Node, modules, environment, installed versions, and what a process inherits: besides editable
    code files, all that the zygote and its forks depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    zygote: KeptZygote
    timer: threading.Timer


_lock = threading.Lock()
_kept: list[_Kept] = []
"""In the order in which they were last used."""


def kept_or_new_zygote(spec: ZygoteSpec, node_id: str) -> KeptZygote:
    """Return a kept zygote if all that it depends on is the same, or start one.

    Args:
        spec: the zygote's settings, without a name.
        node_id: the driver's node.
    """
    versions = sorted(_installed(spec.path))
    reuse_key = node_id, spec, _relevant_variables(), versions, _inherited()
    for kept in _taken(lambda zygote: zygote.reuse_key == reuse_key):
        if kept.connection.is_current():
            return kept
        kept.connection.end()
    token = secrets.token_hex(8)
    connection = ZygoteConnection.open(replace(spec, name=zygote_name(token, node_id)))
    return KeptZygote(token=token, connection=connection, reuse_key=reuse_key)


def _relevant_variables() -> dict[str, str]:
    """Return the variables that imports may depend on."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_NO_EFFECT)}


def _inherited() -> tuple[Any, ...]:
    """Return what a process has from the one that starts it, besides variables."""
    limits = (getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
    return (
        umask(),
        tuple(map(resource.getrlimit, limits)),
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
    )


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
    # A run beside this one, which needed the same, has left it.
    for before in _taken(lambda other: other.reuse_key == zygote.reuse_key):
        before.connection.end()
    with contextlib.suppress(OSError):
        # The next run must not get this run's preloaded modules.
        zygote.connection.request(["reset"])
    timer = threading.Timer(_KEPT_S, _let_go_of, (zygote,))
    timer.name, timer.daemon = "polytrain-kept-zygote", True
    with _lock:
        _kept.append(_Kept(zygote=zygote, timer=timer))
        oldest = _kept[0].zygote if len(_kept) > _KEPT_AT_MOST else None
    try:
        timer.start()
    except RuntimeError:  # the system refuses the thread, and nothing else ends the zygote in time
        oldest = zygote
    if oldest is not None:
        _let_go_of(oldest)


def let_go() -> None:
    """End the kept zygotes, if there are any."""
    for zygote in _taken(lambda zygote: True):
        zygote.connection.end()


def kept_processes() -> set[int]:
    """Return the process ids of the kept zygotes that this process started."""
    with _lock:
        pids = {kept.zygote.connection.pid for kept in _kept}
    return {pid for pid in pids if pid is not None}


def _let_go_of(zygote: KeptZygote) -> None:
    for taken in _taken(lambda other: other is zygote):
        taken.connection.end()


def _taken(is_wanted: Callable[[KeptZygote], bool]) -> list[KeptZygote]:
    """Take those out that are wanted: from here on they are the caller's."""
    global _kept
    with _lock:
        taken = [kept for kept in _kept if is_wanted(kept.zygote)]
        _kept = [kept for kept in _kept if not is_wanted(kept.zygote)]
    for kept in taken:
        kept.timer.cancel()
    return [kept.zygote for kept in taken]


def _forget_in_fork() -> None:
    """Forget the kept zygotes in a forked child, which has no connection to them."""
    global _lock, _kept
    # Replace the lock: another thread of the driver may have held it.
    _lock, _kept = threading.Lock(), []


os.register_at_fork(after_in_child=_forget_in_fork)
