"""Warm zygotes: they outlive the run, and later scripts of the same user fork from them.

The address is a digest of everything that a zygote depends on. So a script finds a warm zygote only
if it would have started the same one; one that nobody finds ends by itself. So does one that has
imported code which was edited since.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from polytrain.workers.processes.client import (
    WARM_PREFIX,
    ZygoteConnection,
    ZygoteSpec,
    zygote_name,
)
from polytrain.workers.processes.lifetime import Description
from polytrain_plugins import Problem

WARM_VARIABLE = "POLYTRAIN_WARM"
"""Variable with the minutes for which runs leave their zygote; unset, they don't."""

OF_NO_EFFECT = ("RAY_", "PYTEST_", "POLYTRAIN_")
"""Prefixes of variables that may differ: pytest sets one to the name of each test."""

_OF_THE_SHELL = frozenset({"_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "WINDOWID"})
_NAMESPACES = ("mnt", "pid", "user", "ipc")

_REACHED_S = 10.0
"""Seconds within which a warm zygote that ends must release its address."""

_started: list[subprocess.Popen[bytes]] = []
"""Warm zygotes of this process, to be reaped if they end first."""


def find(spec: ZygoteSpec, node_id: str) -> ZygoteConnection | None:
    """Connect to a warm zygote that has what this one would have; None if there is none."""
    connection = ZygoteConnection.existing(zygote_name(warm_token(spec.path), node_id))
    if connection is None:
        return None
    held = connection.description()
    if held is not None and held.is_current and held.kept_s > 0 and serves(held, spec):
        return connection
    connection.leave()
    return None


def start(
    spec: ZygoteSpec, node_id: str, *, kept_s: float, within_s: float = _REACHED_S
) -> ZygoteConnection:
    """Start a warm zygote, which stays for a time after its last use.

    Args:
        spec: its settings, without a name.
        node_id: the node.
        kept_s: seconds.
        within_s: seconds to wait for the address, if another process has it.

    Raises:
        OSError: the system can't start the process, or another one holds the address.
    """
    name = zygote_name(warm_token(spec.path), node_id)
    connection = ZygoteConnection.open(replace(spec, name=name, kept_s=kept_s), within_s=within_s)
    process = connection.detach()
    _started[:] = [other for other in _started if other.poll() is None]
    if process is not None:
        _started.append(process)
    return connection


def serves(held: Description, spec: ZygoteSpec) -> bool:
    """Return whether a zygote has the modules and variables of another's settings."""
    return set(spec.modules) <= set(held.modules) and (
        spec.environment.items() <= held.environment.items()
    )


def held_zygotes() -> Iterator[tuple[ZygoteConnection, Description | None]]:
    """Connect to all warm zygotes of this user; None for one that is still importing."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    paths = {line.split()[-1] for line in lines}
    for path in sorted(paths):
        if path.startswith(f"@{WARM_PREFIX[1:]}"):
            connection = ZygoteConnection.existing(f"\0{path[1:]}")
            if connection is not None:
                yield connection, connection.description()


def warm_seconds(environment: Mapping[str, str]) -> float | None:
    """Return for how long runs leave their zygote; None if they don't, or the value is wrong."""
    try:
        minutes = float(environment.get(WARM_VARIABLE) or 0)
    except ValueError:
        return None
    return minutes * 60 if 0 < minutes < float("inf") else None


def warm_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem if the variable isn't a number of minutes."""
    given = environment.get(WARM_VARIABLE)
    if given and warm_seconds(environment) is None:
        yield Problem(
            field=WARM_VARIABLE,
            what=f"it is {given!r}, which isn't a number of minutes",
            remedy="Set it to a number above 0, or unset it",
        )


def warm_token(path: Sequence[str]) -> str:
    """Return the token of warm zygotes with this `sys.path`, as this process would start them."""
    depends_on = [
        [sys.executable, sys.prefix, sys.version, str(sys.flags)],
        list(path),
        relevant_variables(os.environ),
        installed_versions(path),
        _limits(),
    ]
    return f"warm-{hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()}"


def relevant_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that imports may depend on, sorted by name."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if not name.startswith(OF_NO_EFFECT) and name not in _OF_THE_SHELL
    }


def installed_versions(path: Sequence[str]) -> list[str]:
    """Return what identifies the distributions that are installed in directories, sorted."""
    return sorted(_installed(path))


def _installed(path: Sequence[str]) -> Iterator[str]:
    for directory in path:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                # A name has the version; a new installation has a new time.
                if entry.name.endswith((".dist-info", ".egg-info", ".pth")):
                    yield f"{directory} {entry.name} {entry.stat().st_mtime_ns}"


def _limits() -> list[str]:
    """What worker processes inherit from whoever starts the zygote."""
    status = Path("/proc/self/status").read_text().splitlines()
    inherited = ("Umask:", "Uid:", "Gid:", "Groups:", "Cap", "Seccomp:", "NoNewPrivs:")
    return [
        *(line for line in status if line.startswith(inherited)),
        Path("/proc/self/limits").read_text(),
        Path("/proc/self/cgroup").read_text(),
        *(os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES),
        str(sorted(os.sched_getaffinity(0))),
        str(os.getpriority(os.PRIO_PROCESS, 0)),
    ]
