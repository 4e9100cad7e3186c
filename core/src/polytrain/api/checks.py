"""Everything that is wrong with a request for a run, found before anything starts."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytrain import satellites
from polytrain.api.backend_checks import (
    backend_problems,
    function_problems,
    ray_data_problems,
    unsaved_end_problems,
    unused_gpu_problems,
    virtual_worker_problems,
)
from polytrain.api.cluster_checks import (
    cluster_problems,
    directory_problems,
    guard_problems,
    label_problems,
    refused_by_ray,
    system_problems,
)
from polytrain.api.config_checks import config_problems, run_config_problems
from polytrain.api.datasets import described_datasets, grouped_datasets
from polytrain.api.validation_checks import (
    inline_problems,
    memory_problems,
    ray_problems,
    validation_problems,
    without_ray_problems,
)
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.checkpoint.starting_point import StartingPoint, starting_point, verify
from polytrain.checkpoint.store import CHECKPOINTS
from polytrain.config.configs import RunConfig, ScalingConfig
from polytrain.config.constraints import storage_place, wrong_type
from polytrain.config.listening import port_problems
from polytrain.config.run_spec import RunSpec
from polytrain.errors import CheckpointError
from polytrain.functions.function_checks import pickle_problems
from polytrain.output.observers import follow_record
from polytrain.policy.labels import allowed
from polytrain.policy.scaling import (
    choose_cluster,
    local_problems,
    new_ray_problems,
)
from polytrain.record.history import JOURNAL
from polytrain.storage import DEFAULT_STORAGE
from polytrain.storage.location import Location, storage_problems
from polytrain.workers.available_clusters import available_clusters, ray_client_address
from polytrain.workers.ray.connection import client_problem
from polytrain_plugins import Backend, DatasetInfo, Demand, Job, Problem
from polytrain_plugins.returned import demand_of, total_steps_of

if TYPE_CHECKING:
    from polytrain.data.shards.assignment import RunDataset

_CHECKED_WITHIN_S = 10
"""Seconds for which a check of the starting checkpoint retries: its address may be misspelt."""


def checked(spec: RunSpec) -> tuple[tuple[RunDataset, ...], tuple[Problem, ...]]:
    """Describe the data, and collect everything that is wrong. Starts nothing.

    Args:
        spec: the request. Its backend is None if that lacks options without which it can't be made.
    """
    backend: Backend | None = spec.backend
    if refused := (*guard_problems(), *directory_problems()):
        return (), refused
    problems = [*config_problems(spec.scaling_config, spec.run_config)]
    problems += run_config_problems(spec)
    wrong_validation = () if spec.validation_config is None else tuple(validation_problems(spec))
    if wrong_validation:
        problems += wrong_validation
        spec = replace(spec, validation_config=None)
    if problems:
        # The following checks read the configuration; replace what is wrong with defaults.
        storage = getattr(spec.run_config, "storage_path", None)
        is_wrong = [*storage_place(storage)]
        run = RunConfig(storage_path=None if is_wrong else storage)
        spec = replace(spec, scaling_config=ScalingConfig(), run_config=run)
    problems += storage_problems_of(spec, location_of(spec))
    problems += cluster_problems_now(spec)
    datasets, wrong_data = described_datasets(spec)
    problems += wrong_data
    # A wrong request needn't wait for a storage.
    problems += _start_problems(spec, patience_s=0 if problems else _CHECKED_WITHIN_S)
    if backend is not None:
        problems += function_problems(spec)
        if not problems and not spec.is_inline:
            problems += ray_data_problems(spec)
        job = job_of(spec, datasets)
        problems += backend_problems(backend, job)
        problems += unused_gpu_problems(spec)
        problems += virtual_worker_problems(spec)
        if not problems and not spec.is_inline:
            problems += pickle_problems(
                "backend",
                backend,
                remedy="Give it what can be pickled; what else it needs, its engine makes",
                any_size=True,
            )
        if not problems:
            problems += unsaved_end_problems(spec)
        if not problems:
            # It needs a backend with valid options.
            demand = demand_of(backend, job)
            if spec.train_loop_per_worker is None:
                total_steps_of(backend)
            problems += _port_problems(spec, demand)
        if not problems:
            # This reads a column.
            datasets, wrong_rows = grouped_datasets(
                datasets,
                demand,
                num_workers=job.num_workers,
                is_table=demand.reads_tables and spec.train_loop_per_worker is None,
            )
            problems += wrong_rows
    return datasets, tuple(problems)


def start_of(spec: RunSpec, *, patience_s: float = math.inf) -> StartingPoint:
    """The starting point of a new run.

    Args:
        patience_s: the most seconds for which unavailable storage is retried, now and later.

    Raises:
        OSError: the checkpoint can't be read.
        ValueError: its files aren't those that were committed.
    """
    given = spec.restore_from
    if given is None:
        return StartingPoint()
    retry_s = min(patience_s, spec.run_config.storage_timeout_s)
    if isinstance(given, Checkpoint):
        return starting_point(Location.of(given.path, given.filesystem, retry_s=retry_s))
    return starting_point(Location.of(given, retry_s=retry_s))


def _start_problems(spec: RunSpec, *, patience_s: float) -> Iterable[Problem]:
    given: Any = spec.restore_from
    if given is not None and not isinstance(given, Checkpoint | str | Path):
        wrong = wrong_type("restore_from", given, Checkpoint)
        is_result = isinstance(getattr(given, "checkpoint", None), Checkpoint)
        yield replace(wrong, remedy="Pass its checkpoint") if is_result else wrong
        return
    try:
        yield from _wrong_start(spec, start_of(spec, patience_s=patience_s))
    except (OSError, ValueError) as error:
        yield unreadable_start(error)


def _wrong_start(spec: RunSpec, start: StartingPoint) -> Iterable[Problem]:
    given = start.location
    # None without options that it needs.
    backend: Backend | None = spec.backend
    if given is None:
        return
    if start.backend is None:
        # Any other directory without a manifest may hold what the training function can load.
        location = given.parent if given.name == CHECKPOINTS else given
        if any(location.open().read_log(JOURNAL)):
            yield Problem(
                field="restore_from",
                what=f"{given.address} is a run, not one of its checkpoints",
                remedy="Pass the run's Result.checkpoint or one of its Result.best_checkpoints; "
                f"Result.from_path({location.address!r}) returns its result",
            )
        return
    if backend is None or spec.train_loop_per_worker is not None:
        return
    if backend.capabilities.declarative and start.backend != backend.name:
        yield Problem(
            field="restore_from",
            what=f"it is a checkpoint of the backend {start.backend!r}, "
            f"which {backend.name!r} can't read",
            remedy=f"Pass a checkpoint of {backend.name!r}, or a training function that reads it",
        )


def damage_problems(start: StartingPoint) -> Iterable[Problem]:
    """Yield a problem if the starting checkpoint is damaged; reads all of its files."""
    try:
        verify(start)
    except (OSError, CheckpointError) as error:
        yield unreadable_start(error)


def unreadable_start(error: Exception) -> Problem:
    """The problem of a starting checkpoint that can't be read."""
    return Problem(
        field="restore_from",
        what=f"it can't be read: {error}",
        remedy="Pass a checkpoint of a run, such as Result.checkpoint, or its directory. A run "
        "that has checkpoints of its own is resumed without it. Files that you have changed can be "
        f"passed as a copy that lacks {MANIFEST_NAME}",
    )


def storage_problems_of(spec: RunSpec, location: Location) -> Iterable[Problem]:
    """Yield why a run can't be stored at this location."""
    num_workers = spec.scaling_config.max_workers
    name = spec.run_config.name
    yield from storage_problems(location, name=name, num_workers=num_workers)
    track, observers = spec.run_config.track, spec.run_config.observers
    if follow_record(track, observers):
        yield from satellites.trackers.place_problems(track, observers, location)
    if num_workers == 0:
        yield from memory_problems(spec.validation_config, location)


def fit_problems(resume: Any, wait: Any) -> Iterable[Problem]:
    """Yield a problem for each value that `Trainer.fit` doesn't take."""
    if not isinstance(wait, bool):
        yield Problem(
            field="wait",
            what=f"{wait!r} is neither True nor False",
            remedy="Give False to get a handle at once, or True to wait for the result",
        )
    if resume not in ("auto", "never"):
        yield Problem(
            field="resume",
            what=f"{resume!r} is unknown",
            remedy="Give 'auto' to resume a run of the same name, or 'never' to start it over",
        )


def cluster_problems_now(spec: RunSpec) -> Iterable[Problem]:
    """Problems that show before any worker starts: on this machine, or on a running Ray."""
    scaling = spec.scaling_config
    if spec.is_inline:
        return inline_problems(spec.validation_config)
    refused = tuple(system_problems())
    if refused:
        return refused
    around = available_clusters(spec)
    if choose_cluster(scaling, around).is_local:
        problems = tuple(local_problems(scaling, around))
        validation = spec.validation_config
        return problems if validation is None else (*problems, *without_ray_problems(validation))
    problem = client_problem(ray_client_address())
    if problem is not None:
        return (problem,)
    if not around.ray_is_initialized:
        return new_ray_problems(scaling, around)
    return _problems_on_ray(spec)


def _problems_on_ray(spec: RunSpec) -> tuple[Problem, ...]:
    from polytrain.ray_api.state import autoscaler_totals, living_nodes, node_labels
    from polytrain.workers.ray.autoscaler import can_add_nodes

    scaling, validation = spec.scaling_config, spec.validation_config
    refused = tuple(refused_by_ray(scaling))
    if refused:
        return (*refused, *ray_problems(validation, None))
    nodes, labels, autoscaler = living_nodes(), node_labels(), autoscaler_totals()
    if autoscaler is not None:
        largest = [autoscaler]
        return (*cluster_problems(scaling, [], autoscaler), *ray_problems(validation, largest))
    able = allowed(labels, scaling.label_selectors)
    problems = (
        *(
            tuple(label_problems(scaling, nodes, labels))
            or cluster_problems(scaling, [nodes[node] for node in nodes if node in able])
        ),
        *ray_problems(validation, [*nodes.values()]),
    )
    # A cluster that is large enough isn't asked whether it grows.
    return tuple(ray_problems(validation, None)) if problems and can_add_nodes() else problems


def _port_problems(spec: RunSpec, demand: Demand) -> Iterable[Problem]:
    scaling, ports = spec.scaling_config, spec.run_config.ports
    is_one_host = spec.is_inline or choose_cluster(scaling, available_clusters(spec)).is_local
    return port_problems(ports, demand, scaling, is_one_host=is_one_host)


def job_of(spec: RunSpec, datasets: tuple[RunDataset, ...]) -> Job:
    """The request, as the backend gets it."""
    names = map(str, spec.datasets) if isinstance(spec.datasets, Mapping) else ()
    known = {dataset.name: dataset.source.info for dataset in datasets}
    return Job(
        num_workers=spec.world_size,
        use_gpu=spec.scaling_config.use_gpu,
        cpus_per_worker=spec.scaling_config.cpus_per_worker,
        virtual_workers=spec.scaling_config.virtual_workers,
        has_training_function=spec.train_loop_per_worker is not None,
        datasets={name: known.get(name, DatasetInfo(name=name)) for name in names},
        is_in_this_environment=_is_in_this_environment(spec),
    )


def _is_in_this_environment(spec: RunSpec) -> bool:
    """Whether workers import what is installed here: inline, or on this machine alone."""
    around = available_clusters(spec)
    return spec.is_inline or (
        not around.runtime_env and not around.ray_is_initialized and around.ray_address is None
    )


def location_of(spec: RunSpec) -> Location:
    """The run's location; it gets a new name if it has none."""
    config = spec.run_config
    runs = Location.of(
        config.storage_path or DEFAULT_STORAGE,
        config.storage_filesystem,
        retry_s=config.storage_timeout_s,
    )
    return runs.below(config.name or _new_name(spec.backend))


def _new_name(backend: Backend | None) -> str:
    made_from = backend.name if backend is not None else "run"
    return f"{made_from}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
