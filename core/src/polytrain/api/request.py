"""A user's request, and everything that is wrong with it. The checks start nothing."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytrain import satellites
from polytrain.api.checkpoint_validation import (
    inline_problems,
    memory_problems,
    ray_problems,
    validation_problems,
    without_ray_problems,
)
from polytrain.api.cluster_validation import cluster_problems, label_problems, refused_by_ray
from polytrain.api.datasets import described_datasets, grouped_datasets
from polytrain.api.problems import (
    backend_problems,
    config_of,
    frequency_problems,
    function_problems,
    ray_data_problems,
    unused_gpu_problems,
)
from polytrain.api.stop_checks import stop_problems
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.starting_point import StartingPoint, starting_point, verify
from polytrain.config.checks import config_problems
from polytrain.config.configs import DataConfig, RunConfig, ScalingConfig
from polytrain.config.constraints import wrong_type
from polytrain.config.validation_config import ValidationConfig
from polytrain.errors import CheckpointError
from polytrain.output.observer_checks import follow_record, observers_problems
from polytrain.policy.cluster import (
    AvailableClusters,
    choose_cluster,
    local_problems,
    new_ray_problems,
)
from polytrain.policy.labels import allowed
from polytrain.storage.checks import storage_problems
from polytrain.storage.location import Location
from polytrain.workers.available_clusters import available_clusters, ray_client_address
from polytrain.workers.processes.requirements import system_problems
from polytrain.workers.processes.warm import warm_problems
from polytrain.workers.ray.address import client_problem
from polytrain.workers.spawned_scripts import guard_problems
from polytrain_plugins import Backend, DatasetInfo, Job, Problem

if TYPE_CHECKING:
    from polytrain.data.shards.assignment import RunDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of `Trainer`, except the backend."""

    training_function: Callable[..., Any] | None
    training_config: Mapping[str, Any] | None
    datasets: Any
    dataset_configs: Any
    scaling: ScalingConfig
    run: RunConfig
    restore_from: Any
    validation: Any = None

    @classmethod
    def of(
        cls,
        function: Callable[..., Any] | None,
        *,
        train_loop_config: Mapping[str, Any] | None,
        datasets: Mapping[str, Any] | None,
        dataset_config: DataConfig | Mapping[str, DataConfig] | None,
        scaling_config: ScalingConfig | None,
        run_config: RunConfig | None,
        restore_from: Checkpoint | str | Path | None,
        validation_config: ValidationConfig | None = None,
    ) -> Request:
        """The request of these arguments, with defaults for those that were left out."""
        configs: Any = {} if dataset_config is None else dataset_config
        if isinstance(configs, DataConfig) and isinstance(datasets, Mapping):
            configs = dict.fromkeys(datasets, configs)
        return cls(
            training_function=function,
            training_config=config_of(function, train_loop_config),
            datasets={} if datasets is None else datasets,
            dataset_configs=configs,
            scaling=ScalingConfig() if scaling_config is None else scaling_config,
            run=RunConfig() if run_config is None else run_config,
            restore_from=restore_from,
            validation=validation_config,
        )

    def with_program(self, backend: Backend) -> Request:
        """The request with what the backend's options name in place of a training function.

        A program is restarted after every failure. One that reports nothing has no steps, by which
        an error that comes again can be told from one that passes.
        """
        failures = self.run.failure_config
        program = backend.program(max_failures=failures.max_failures)
        if program is None:
            return self
        if failures.retry_user_errors == "unless_repeated":
            failures = replace(failures, retry_user_errors=True)
        run = replace(self.run, failure_config=failures)
        return replace(self, training_function=program, run=run)


def checked(
    backend: Backend | None, request: Request
) -> tuple[tuple[RunDataset, ...], tuple[Problem, ...]]:
    """Describe the data, and collect everything that is wrong. Starts nothing.

    Args:
        backend: None if its own options don't suffice to make it.
        request: everything else.
    """
    problems = [*guard_problems(), *config_problems(request.scaling, request.run)]
    program = None if backend is None else backend.program(max_failures=0)
    problems += frequency_problems(request.run, request.training_function or program)
    problems += observers_problems(getattr(request.run, "observers", ()))
    problems += _problems_of_satellites(request.run)
    problems += stop_problems(request.run)
    wrong_validation = tuple(
        validation_problems(
            request.validation, has_training_function=request.training_function is not None
        )
    )
    if wrong_validation:
        problems += wrong_validation
        request = replace(request, validation=None)
    if problems:
        # The following checks read the configuration; replace what is wrong with defaults.
        storage = getattr(request.run, "storage_path", None)
        run = RunConfig(storage_path=storage if isinstance(storage, str | Path) else None)
        request = replace(request, scaling=ScalingConfig(), run=run)
    problems += storage_problems_of(request, location_of(request.run, backend))
    problems += cluster_problems_now(request)
    declarative = backend is not None and backend.capabilities.declarative
    datasets, wrong_data = described_datasets(
        request.datasets,
        request.dataset_configs,
        needs_train=declarative and request.training_function is None,
        num_workers=max(1, request.scaling.max_workers),
    )
    problems += wrong_data
    problems += _start_problems(request)
    if backend is not None:
        problems += function_problems(request.training_function, request.training_config, backend)
        if not problems and request.scaling.num_workers != 0:
            problems += ray_data_problems(request.training_function, request.training_config)
        job = job_of(request, datasets)
        problems += backend_problems(backend, job)
        problems += unused_gpu_problems(backend, request.scaling)
        if not problems:
            # This reads a column, and needs a backend with valid options.
            datasets, wrong_groups = grouped_datasets(
                datasets, backend.demand(job), num_workers=job.num_workers
            )
            problems += wrong_groups
    return datasets, tuple(problems)


def _problems_of_satellites(config: Any) -> Iterable[Problem]:
    """Yield what is wrong with what satellites do for a run. Without them nothing is asked."""
    track, observers = getattr(config, "track", None), getattr(config, "observers", ())
    if follow_record(track, observers):
        yield from satellites.trackers.tracker_problems(track, observers)
    callbacks: Any = getattr(config, "callbacks", ())
    if callbacks != ():
        yield from satellites.callbacks.callback_problems(callbacks)


def start_of(request: Request) -> StartingPoint:
    """The starting point of a new run.

    Raises:
        OSError: the checkpoint can't be read.
        ValueError: its files aren't those that were committed.
    """
    given = request.restore_from
    if given is None:
        return StartingPoint()
    if isinstance(given, Checkpoint):
        return starting_point(Location.of(given.path, given.filesystem, retry_s=0))
    return starting_point(Location.of(given, retry_s=0))


def _start_problems(request: Request) -> Iterable[Problem]:
    given: Any = request.restore_from
    if given is not None and not isinstance(given, Checkpoint | str | Path):
        yield wrong_type("restore_from", given, Checkpoint)
        return
    try:
        start_of(request)
    except (OSError, ValueError) as error:
        yield _unreadable_start(error)


def damage_problems(start: StartingPoint) -> Iterable[Problem]:
    """Yield a problem if the starting checkpoint is damaged; reads all of its files."""
    try:
        verify(start)
    except (OSError, CheckpointError) as error:
        yield _unreadable_start(error)


def _unreadable_start(error: Exception) -> Problem:
    return Problem(
        field="restore_from",
        what=f"it can't be read: {error}",
        remedy="Pass a checkpoint of a run, such as Result.checkpoint, or its directory",
    )


def storage_problems_of(request: Request, location: Location) -> Iterable[Problem]:
    """Yield why a run can't be stored at this location."""
    num_workers = request.scaling.max_workers
    yield from storage_problems(location, num_workers=num_workers)
    track, observers = request.run.track, request.run.observers
    if follow_record(track, observers):
        yield from satellites.trackers.place_problems(track, observers, location)
    if num_workers == 0:
        yield from memory_problems(request.validation, location)


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


def cluster_problems_now(request: Request) -> Iterable[Problem]:
    """Problems that show before any worker starts: on this machine, or on a running Ray."""
    scaling = request.scaling
    if scaling.num_workers == 0:
        return inline_problems(request.validation)
    refused = (*system_problems(), *warm_problems(os.environ))
    if refused:
        return refused
    around = surroundings_of(request)
    if choose_cluster(scaling, around).is_local:
        return (*local_problems(scaling, around), *without_ray_problems(request.validation))
    problem = client_problem(ray_client_address())
    if problem is not None:
        return (problem,)
    if not around.ray_is_initialized:
        return new_ray_problems(scaling, around)
    return _problems_on_ray(request)


def _problems_on_ray(request: Request) -> tuple[Problem, ...]:
    from polytrain.ray_api.state import autoscaler_totals, living_nodes, node_labels
    from polytrain.workers.ray.autoscaler import can_add_nodes

    scaling, validation = request.scaling, request.validation
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


def surroundings_of(request: Request) -> AvailableClusters:
    """The clusters that the request's workers could use."""
    return available_clusters(
        request.training_function,
        request.datasets,
        request.validation,
        runtime_env=request.run.worker_runtime_env,
    )


def job_of(request: Request, datasets: tuple[RunDataset, ...]) -> Job:
    """The request, as the backend gets it."""
    names = map(str, request.datasets) if isinstance(request.datasets, Mapping) else ()
    known = {dataset.name: dataset.source.info for dataset in datasets}
    return Job(
        num_workers=max(1, request.scaling.max_workers),
        use_gpu=request.scaling.use_gpu,
        cpus_per_worker=request.scaling.cpus_per_worker,
        has_training_function=request.training_function is not None,
        datasets={name: known.get(name, DatasetInfo(name=name)) for name in names},
        is_in_this_environment=_is_in_this_environment(request),
    )


def _is_in_this_environment(request: Request) -> bool:
    """Whether workers import what is installed here: inline, or on this machine alone."""
    around = surroundings_of(request)
    return request.scaling.num_workers == 0 or (
        not around.runtime_env and not around.ray_is_initialized and around.ray_address is None
    )


def location_of(config: RunConfig, backend: Backend | None) -> Location:
    """The run's location; it gets a new name if it has none."""
    runs = Location.of(
        config.storage_path or "~/polytrain_results",
        config.storage_filesystem,
        retry_s=config.storage_timeout_s,
    )
    return runs.below(config.name or _new_name(backend))


def _new_name(backend: Backend | None) -> str:
    made_from = backend.name if backend is not None else "run"
    return f"{made_from}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
