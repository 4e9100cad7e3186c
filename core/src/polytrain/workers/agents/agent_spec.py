"""The settings of a run's agents, and those of a node's zygote."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polytrain.checkpoint.store import CheckpointStore
from polytrain.config.listening import ports_of
from polytrain.config.run_spec import RunSpec
from polytrain.config.runtime_env import parts_of_ray, variables_of
from polytrain.events.output import OutputRoute
from polytrain.policy.placement import NodeAddress
from polytrain.workers.processes.zygote_connection import ZygoteSpec, zygote_name
from polytrain_plugins import Demand

LEAVE_TIMEOUT_S = 60.0
"""Seconds that a worker process may take to end once every rank is done."""

_KILL_TIMEOUT_S = 60.0
"""Seconds that a killed worker process may take to end, and to free its memory."""

# Modules that every run's zygotes import: most training functions use numpy. Runs with data add
# pandas, which Arrow's conversions use.
PRELOAD = ("polytrain.workers.session.worker_process", "numpy")
PRELOAD_WITH_DATA = ("pandas", "polytrain.data.shards.opening")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """The settings of a run's agents."""

    token: str
    """Identifies the run on every node."""

    zygote: ZygoteSpec
    """The zygote's settings; `node_zygote` adds the node to its name."""

    directory: str
    """The working directory of worker processes: the driver's, unless Ray has set up another."""

    argv: tuple[str, ...]
    """The driver's `sys.argv`."""

    prefix: str
    """The driver's `sys.prefix`."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """The driver's versions of what nodes need alike; empty if they aren't compared."""

    runtime_env: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The runtime environment that Ray sets up for the host; empty for none."""

    network: str | None = None
    """The network on which ranks of several nodes listen: `RunConfig.network_interface`."""

    ports: range | None = None
    """The ports at which ranks listen: `RunConfig.ports`; None for any."""

    store: CheckpointStore

    marker: str
    """A file that the driver wrote into the run's storage."""

    hang_timeout_s: float | None
    """Seconds without progress after which an event is sent; None for never."""

    straggler_window_s: float | None
    """Seconds over which a worker process's load is measured; None for never."""

    merges_files: bool
    """Whether ranks other than 0 store only files that rank 0's part of a checkpoint lacks."""

    passes_all_reports: bool
    """Whether all reports of ranks above 0 are sent, and not only the newest."""

    route: OutputRoute
    """How the output of worker processes gets to the user."""

    leave_timeout_s: float
    """Seconds that a worker process may take to leave before it is killed."""

    kill_timeout_s: float
    """Seconds to wait for the end of a killed worker process."""


def agent_spec(
    run: RunSpec,
    demand: Demand,
    *,
    store: CheckpointStore,
    with_data: bool,
    path: tuple[str, ...],
    marker: str,
    versions: Mapping[str, str],
    passes_all_reports: bool,
    route: OutputRoute,
) -> AgentSpec:
    """Return the settings of the agents of a run; the arguments are those of `AgentSpec`.

    Args:
        with_data: whether the run has data sets.
        path: the driver's `sys.path`.
    """
    config, failure = run.run_config, run.run_config.failure_config
    runtime_env = config.worker_runtime_env or {}
    token, threads = secrets.token_hex(8), run.scaling_config.cpus_per_worker
    zygote = zygote_for(demand, name=token, threads=threads, with_data=with_data, path=path)
    return AgentSpec(
        token=token,
        zygote=replace(zygote, variables=variables_of(runtime_env)),
        directory=os.getcwd(),
        argv=tuple(sys.argv),
        prefix=sys.prefix,
        # A runtime environment may be there to bring other versions.
        versions={} if parts_of_ray(runtime_env) else versions,
        # If it only sets variables, agents set them for worker processes themselves.
        runtime_env=runtime_env if parts_of_ray(runtime_env) else {},
        network=config.network_interface,
        ports=ports_of(config.ports),
        store=store,
        marker=marker,
        hang_timeout_s=failure.hang_timeout_s,
        straggler_window_s=failure.straggler_window_s if failure.stragglers != "ignore" else None,
        merges_files=run.merges_files,
        passes_all_reports=passes_all_reports,
        route=route,
        leave_timeout_s=LEAVE_TIMEOUT_S,
        kill_timeout_s=_KILL_TIMEOUT_S,
    )


def zygote_for(
    demand: Demand, *, name: str, threads: int, with_data: bool, path: tuple[str, ...]
) -> ZygoteSpec:
    """Return the settings of a zygote that imports the modules for a backend's processes.

    Args:
        demand: the backend's demand.
        name: the zygote's name.
        with_data: whether the run has data sets.
        path: the driver's `sys.path`.
    """
    return ZygoteSpec(
        name=name,
        environment={**demand.environment, "OMP_NUM_THREADS": str(threads)},
        modules=(*PRELOAD, *(PRELOAD_WITH_DATA if with_data else ()), *demand.preload),
        path=path,
    )


def node_zygote(spec: ZygoteSpec, prefix: str, place: NodeAddress) -> ZygoteSpec:
    """Return the settings of this node's zygote, with its address and import path.

    Args:
        prefix: the driver's `sys.prefix`.
    """
    name = zygote_name(spec.name, place.node_id)
    is_same_environment = sys.prefix == prefix
    if not is_same_environment:
        # On this node the driver may have started a zygote in its own environment.
        name += hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    path = import_path(
        spec.path,
        here=sys.path,
        variable=os.environ.get("PYTHONPATH", ""),
        is_same_environment=is_same_environment,
    )
    return replace(spec, name=name, path=path)


def import_path(
    driver: Sequence[str], *, here: Sequence[str], variable: str, is_same_environment: bool
) -> tuple[str, ...]:
    """Return the driver's path, with the node's own entries.

    A Ray job's `runtime_env` adds modules to a node's processes: through `PYTHONPATH`
    (`working_dir`, `py_modules`), or through a virtual environment (`pip`).

    Args:
        driver: the driver's `sys.path`.
        here: the `sys.path` of the process that starts worker processes on the node.
        variable: its `PYTHONPATH`.
        is_same_environment: whether it has the driver's Python environment (`sys.prefix`).

    Returns:
        The `sys.path` of a worker process, each entry once.
    """
    named = [entry for entry in variable.split(os.pathsep) if entry]
    own = [entry for entry in here if entry and not _is_rays(entry)]
    first = [entry for entry in named if entry not in driver]
    if not is_same_environment:
        # The node's packages come first: the driver's may have other versions.
        first = [*first, *own]
    return tuple(dict.fromkeys([*first, *driver, *own]))


def _is_rays(entry: str) -> bool:
    """Return whether an entry is for Ray's own worker processes, which shadows user packages."""
    return entry.endswith(("thirdparty_files", "ray/_private/workers"))
