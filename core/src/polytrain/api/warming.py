"""What `polytrain warm` does: starts, shows and ends warm zygotes."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from polytrain.linux.processes import peer_of
from polytrain.linux.readable import is_readable
from polytrain.output.echo import echo, echo_lines
from polytrain.workers.processes.client import (
    ZygoteConnection,
    ZygoteSpec,
    zygote_name,
)
from polytrain.workers.processes.lifetime import Description
from polytrain.workers.processes.warm import find, held_zygotes, start, warm_token
from polytrain_plugins import Demand, Job, RegistryError, backend_names, load_backend

_IMPORTED_S = 120.0
"""Seconds that the imports may take."""

_ENDED_S = 10.0
"""Seconds that a zygote may take to end."""


def warm(names: Sequence[str], *, kept_s: float, cpus_per_worker: int) -> int:
    """Start a warm zygote with these backends and modules, unless there is one.

    Args:
        names: of backends, or of other modules.
        kept_s: seconds for which it stays after its last use.
        cpus_per_worker: as in `ScalingConfig` of the scripts.

    Returns:
        The exit code: 2 if a name is wrong, 1 if the process can't start or the imports fail.
    """
    try:
        spec = _spec(names, cpus_per_worker)
    except (RegistryError, ValueError) as error:
        echo(str(error), err=True)
        return 2
    node_id = socket.gethostname()
    connection = find(spec, node_id)
    if connection is None:
        # One with other modules: it ends with the scripts that use it.
        other = ZygoteConnection.existing(zygote_name(warm_token(spec.path), node_id))
        if other is not None and not _end(other):
            echo("A warm process with other modules is in use. Try again later", err=True)
            return 1
        try:
            connection = start(spec, node_id, kept_s=kept_s)
        except OSError as error:
            echo(str(error), err=True)
            return 1
    held = connection.description(_IMPORTED_S)
    if held is None:
        echo_lines(f"The imports failed: {connection.last_output()}", err=True)
        return 1
    echo(_line(held))
    connection.leave()
    return 0


def status() -> int:
    """Print what this user's warm zygotes hold."""
    found = False
    for connection, held in held_zygotes():
        found = True
        pid, _ = peer_of(connection.socket)
        echo(f"process {pid}: importing" if held is None else _line(held))
        connection.leave()
    if not found:
        echo("No process is warm. Start one with: python -m polytrain warm torch")
    return 0


def stop() -> int:
    """End this user's warm zygotes. One that a script uses ends with that script."""
    for connection, _ in list(held_zygotes()):
        pid, _ = peer_of(connection.socket)
        ended = _end(connection)
        echo(f"process {pid}: {'ended' if ended else 'ends with the script that uses it'}")
    return 0


def _spec(names: Sequence[str], cpus_per_worker: int) -> ZygoteSpec:
    from polytrain.workers.driver.agent_group import PRELOAD, PRELOAD_WITH_DATA

    demands = [_demand(name, cpus_per_worker) for name in names]
    environment: dict[str, str] = {}
    for demand in demands:
        environment.update(demand.environment)
    environment["OMP_NUM_THREADS"] = str(cpus_per_worker)
    modules = [*PRELOAD, *PRELOAD_WITH_DATA, *(name for it in demands for name in it.preload)]
    return ZygoteSpec(
        name="",
        environment=environment,
        modules=tuple(dict.fromkeys(modules)),
        path=tuple(entry or os.getcwd() for entry in sys.path),
    )


def _demand(name: str, cpus_per_worker: int) -> Demand:
    if name in backend_names():
        job = Job(
            num_workers=1,
            use_gpu=False,
            cpus_per_worker=cpus_per_worker,
            has_training_function=True,
            datasets={},
        )
        try:
            return load_backend(name)().demand(job)
        except TypeError as error:
            raise ValueError(f"the backend {name!r} needs options: name its modules") from error
    top = name.partition(".")[0]
    found = importlib.util.find_spec(top) if top else None
    if found is None:
        known = ", ".join(backend_names())
        raise ValueError(f"{name!r} is neither a backend ({known}) nor a module here")
    return Demand(preload=(name,))


def _end(connection: ZygoteConnection) -> bool:
    """End a zygote, once it has imported; return whether it has ended."""
    held = connection.description(_IMPORTED_S)
    if held is None:
        connection.leave()
        return False
    ended = os.pidfd_open(held.pid)
    try:
        connection.request(["stop"])
        connection.leave()
        return not held.users and is_readable(ended, _ENDED_S)
    finally:
        os.close(ended)


def _line(held: Description) -> str:
    tops = dict.fromkeys(name.partition(".")[0] for name in held.modules)
    modules = ", ".join(name for name in tops if not name.startswith("polytrain"))
    life = f"in use by {held.users}" if held.users else f"ends in {held.left_s / 60:.1f} minutes"
    if not held.is_current:
        life = "ends with its last use, as code that it has imported was edited"
    return f"process {held.pid}: {modules}; {_memory(held.pid) >> 20} MB; {life}"


def _memory(pid: int) -> int:
    """Bytes of a process's memory; a page that n processes share counts an nth."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0
