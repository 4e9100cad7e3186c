"""The front door: what a user asks for is checked, built and handed over."""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.start import StartingPoint, starting_point, verify
from polytrain.config import DataConfig, RunConfig, ScalingConfig
from polytrain.data.assignment import RunDataset
from polytrain.data.checking import described, grouped, position_problems, ready
from polytrain.errors import CheckpointError, TrainingFailedError
from polytrain.result import Result, recorded
from polytrain.run.chronicle import Chronicle
from polytrain.run.claim import Claim, claimed
from polytrain.run.fit import Run, keeper_of, past_of, run_to_end
from polytrain.run.identity import differences, identity_of
from polytrain.storage.checking import storage_problems
from polytrain.storage.location import Location
from polytrain.validation import (
    backend_problems,
    cluster_problems,
    config_problems,
    function_problems,
    missing_options,
    unknown_options,
    wrong_type,
)
from polytrain_plugins import Backend, DatasetInfo, InvalidJobError, Job, Problem, load_backend

logger = logging.getLogger(__name__)


def make_trainer(
    backend: str,
    train_loop_per_worker: Callable[..., Any] | None = None,
    *,
    train_loop_config: Mapping[str, Any] | None = None,
    datasets: Mapping[str, Any] | None = None,
    dataset_config: Mapping[str, DataConfig] | None = None,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
    restore_from: Checkpoint | str | Path | None = None,
    **options: Any,
) -> Trainer:
    """A trainer of the backend with this name.

    Args:
        backend: "torch", "xgboost", "lightgbm", "tensorflow", or any other that is installed.
        options: the backend's own, as in `Trainer(XGBoost(**options))`.

    The other arguments are those of `Trainer`.

    Raises:
        RegistryError: if the backend can't be had.
        InvalidJobError: if anything is wrong with the arguments; it lists all of it.
    """
    cls = load_backend(backend)
    arguments: dict[str, Any] = {
        "train_loop_config": train_loop_config,
        "datasets": datasets,
        "dataset_config": dataset_config,
        "scaling_config": scaling_config,
        "run_config": run_config,
        "restore_from": restore_from,
    }
    unknown = tuple(unknown_options(cls, options, _TRAINER_ARGUMENTS))
    missing = tuple(missing_options(cls, options))
    if unknown or missing:
        names = {problem.field for problem in unknown}
        known = {name: value for name, value in options.items() if name not in names}
        request = _Request.of(train_loop_per_worker, **arguments)
        _, others = _check(None if missing else cls(**known), request)
        raise InvalidJobError((*unknown, *missing, *others))
    return Trainer(cls(**options), train_loop_per_worker, **arguments)


class Trainer:
    """One training job. `fit` runs it.

    Args:
        backend: the framework and its options, for example `XGBoost(params=…)`.
        train_loop_per_worker: the training function; every worker calls it. Without one, a backend
            that can trains from its options.
        train_loop_config: what the training function is called with. Without it, with nothing.
        datasets: name to data: files, tables, frames, arrays, data sets of other libraries. Every
            row is in exactly one worker's shard.
        dataset_config: name of a data set to what is read of it, and in which order.
        scaling_config: how many workers, and what each gets.
        run_config: name, storage, failures, checkpoints, observers.
        restore_from: a checkpoint that the run begins with, or its directory: the model, and, if
            polytrain has made it, the place in the data.

    Raises:
        InvalidJobError: if anything is wrong with the arguments; it lists all of it.
    """

    def __init__(
        self,
        backend: Backend,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: Mapping[str, DataConfig] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        restore_from: Checkpoint | str | Path | None = None,
    ) -> None:
        given: Any = backend
        if not isinstance(given, Backend):
            _raise_if_any((_no_backend(given),))
        self._backend = backend
        self._request = _Request.of(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            datasets=datasets,
            dataset_config=dataset_config,
            scaling_config=scaling_config,
            run_config=run_config,
            restore_from=restore_from,
        )
        self._datasets, problems = _check(backend, self._request)
        _raise_if_any(problems)

    def fit(self, *, resume: Literal["auto", "never"] = "auto") -> Result:
        """Train, and return what came of it.

        A run of the same name in the same storage is gone on with, from its newest checkpoint, at
        whatever number of workers; if it is finished, its result is returned.

        Ray is used as it is when it is initialised; otherwise it is initialised as `ray.init()`
        would, and shut down again. `num_workers=0` does without.

        Args:
            resume: "never" starts a run of this name over. Its earlier checkpoints stay where they
                are, and don't count any more.

        Raises:
            InvalidJobError: if the job can't be run here; nothing was started.
            RunOwnedError: if another driver works on the run.
            TrainingFailedError: if training failed and was not, or no more, restarted.
            KeyboardInterrupt: on Ctrl-C, after everything has been released.
        """
        request, location = self._request, _location(self._request.run, self._backend)
        _raise_if_any((*_resume_problems(resume), *_storage_problems(request, location)))
        identity = self._identity()
        with contextlib.ExitStack() as stack:
            past = self._past(location, identity, resume)
            if past is None or not past.succeeded:
                impatient = replace(location, patience_s=0)
                claim = stack.enter_context(claimed(location.open(), impatient.open()))
                # Whose it was until now may have written more.
                past = self._past(location, identity, resume)
            if past is not None and past.succeeded:
                logger.warning(
                    "The run in %s is finished: its result is returned. fit(resume='never') "
                    "starts it over.",
                    location.address,
                )
                config = request.run.checkpoint_config
                return recorded(location, past, config=config, backend=self._backend)
            result = run_to_end(self._run(location, identity, claim, past, stack))
        if result.error is not None:
            raise result.error from _root_exception(result.error)
        return result

    def _identity(self) -> dict[str, Any]:
        return identity_of(
            self._backend,
            has_function=self._request.training_function is not None,
            datasets={dataset.name: dataset.config for dataset in self._datasets},
        )

    def _past(
        self, location: Location, identity: Mapping[str, Any], resume: str
    ) -> Chronicle | None:
        """What there is of the run to go on with; None if nothing is."""
        past = None if resume == "never" else past_of(location.open())
        if past is not None:
            # A finished run that is to be longer isn't finished: that is for a new one.
            changeable = () if past.succeeded else self._backend.changeable
            _raise_if_any(tuple(differences(past.identity, identity, changeable=changeable)))
        return past

    def _run(
        self,
        location: Location,
        identity: Mapping[str, Any],
        claim: Claim,
        past: Chronicle | None,
        stack: contextlib.ExitStack,
    ) -> Run:
        request = self._request
        keeper = keeper_of(
            self._backend,
            config=request.run,
            location=location,
            world_size=max(1, request.scaling.num_workers),
            claim=claim,
            past=past,
            origin=_start(request),
        )
        start = keeper.start()
        if not start.own:
            _raise_if_any(tuple(_damage_problems(start)))
        if request.scaling.num_workers > 0:
            from polytrain.workers.cluster import running_ray

            stack.enter_context(running_ray())
            _raise_if_any(tuple(_cluster_problems(request.scaling)))
        demand = self._backend.demand(_job(request, self._datasets))
        datasets, problems = ready(self._datasets, demand, request.scaling)
        _raise_if_any(problems)
        run = Run(
            backend=self._backend,
            training_function=request.training_function,
            training_config=request.training_config,
            datasets=datasets,
            demand=demand,
            scaling=request.scaling,
            config=request.run,
            location=location,
            identity=identity,
            claim=claim,
            past=past,
            keeper=keeper,
            start=start,
        )
        field = f"datasets, for the run in {location.address}" if start.own else "restore_from"
        _raise_if_any(tuple(position_problems(run.specs, start.positions, field=field)))
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the user asked for, besides the backend."""

    training_function: Callable[..., Any] | None
    training_config: Mapping[str, Any] | None
    datasets: Any
    dataset_configs: Any
    scaling: ScalingConfig
    run: RunConfig
    restore_from: Any

    @classmethod
    def of(
        cls,
        function: Callable[..., Any] | None,
        *,
        train_loop_config: Mapping[str, Any] | None,
        datasets: Mapping[str, Any] | None,
        dataset_config: Mapping[str, DataConfig] | None,
        scaling_config: ScalingConfig | None,
        run_config: RunConfig | None,
        restore_from: Checkpoint | str | Path | None,
    ) -> _Request:
        """The request of these arguments, with defaults for those that were left out."""
        return cls(
            training_function=function,
            training_config=train_loop_config,
            datasets={} if datasets is None else datasets,
            dataset_configs={} if dataset_config is None else dataset_config,
            scaling=ScalingConfig() if scaling_config is None else scaling_config,
            run=RunConfig() if run_config is None else run_config,
            restore_from=restore_from,
        )


_TRAINER_ARGUMENTS = (
    "train_loop_per_worker",
    "train_loop_config",
    "datasets",
    "dataset_config",
    "scaling_config",
    "run_config",
    "restore_from",
)


def _check(
    backend: Backend | None, request: _Request
) -> tuple[tuple[RunDataset, ...], tuple[Problem, ...]]:
    """Describe the data, and collect everything that is wrong. Starts nothing.

    Args:
        backend: None if its own options don't suffice to make it.
        request: everything else.
    """
    problems = list(config_problems(request.scaling, request.run))
    if problems:
        # What follows reads the configuration; what is wrong with it has been said.
        storage = getattr(request.run, "storage_path", None)
        run = RunConfig(storage_path=storage if isinstance(storage, str | Path) else None)
        request = replace(request, scaling=ScalingConfig(), run=run)
    problems += _storage_problems(request, _location(request.run, backend))
    problems += _cluster_problems(request.scaling)
    declarative = backend is not None and backend.capabilities.declarative
    datasets, wrong_data = described(
        request.datasets,
        request.dataset_configs,
        needs_train=declarative and request.training_function is None,
        num_workers=max(1, request.scaling.num_workers),
    )
    problems += wrong_data
    problems += _start_problems(request)
    if backend is not None:
        problems += function_problems(request.training_function, request.training_config, backend)
        job = _job(request, datasets)
        problems += backend_problems(backend, job)
        if not problems:
            # Reads a column, and asks a backend whose options are known to be right.
            datasets, wrong_groups = grouped(
                datasets, backend.demand(job), num_workers=job.num_workers
            )
            problems += wrong_groups
    return datasets, tuple(problems)


def _start(request: _Request) -> StartingPoint:
    given = request.restore_from
    if given is None:
        return StartingPoint()
    if isinstance(given, Checkpoint):
        return starting_point(Location.of(given.path, given.filesystem, patience_s=0))
    return starting_point(Location.of(given, patience_s=0))


def _start_problems(request: _Request) -> Iterable[Problem]:
    given: Any = request.restore_from
    if given is not None and not isinstance(given, Checkpoint | str | Path):
        yield wrong_type("restore_from", given, Checkpoint)
        return
    try:
        _start(request)
    except (OSError, ValueError) as error:
        yield _unreadable_start(error)


def _damage_problems(start: StartingPoint) -> Iterable[Problem]:
    """Whether what a run is begun with is what was committed; reads all of it."""
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


def _storage_problems(request: _Request, location: Location) -> Iterable[Problem]:
    return storage_problems(location, num_workers=request.scaling.num_workers)


def _resume_problems(resume: Any) -> Iterable[Problem]:
    if resume not in ("auto", "never"):
        yield Problem(
            field="resume",
            what=f"{resume!r} is unknown",
            remedy="Give 'auto' to go on with a run of the same name, or 'never' to start it over",
        )


def _cluster_problems(scaling: ScalingConfig) -> Iterable[Problem]:
    """What a running Ray can tell; nothing while there is none."""
    if scaling.num_workers == 0 or "ray" not in sys.modules:
        return ()
    from polytrain.workers.cluster import is_running, node_totals

    return cluster_problems(scaling, node_totals()) if is_running() else ()


def _job(request: _Request, datasets: tuple[RunDataset, ...]) -> Job:
    names = map(str, request.datasets) if isinstance(request.datasets, Mapping) else ()
    known = {dataset.name: dataset.source.info for dataset in datasets}
    return Job(
        num_workers=max(1, request.scaling.num_workers),
        use_gpu=request.scaling.use_gpu,
        cpus_per_worker=request.scaling.cpus_per_worker,
        has_training_function=request.training_function is not None,
        datasets={name: known.get(name, DatasetInfo(name=name)) for name in names},
    )


def _location(config: RunConfig, backend: Backend | None) -> Location:
    runs = Location.of(
        config.storage_path or "~/polytrain_results",
        config.storage_filesystem,
        patience_s=config.storage_timeout_s,
    )
    return runs.below(config.name or _new_name(backend))


def _new_name(backend: Backend | None) -> str:
    made_from = backend.name if backend is not None else "run"
    return f"{made_from}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _no_backend(given: Any) -> Problem:
    return Problem(
        field="backend",
        what=f"{given!r} is not a backend",
        remedy="Pass one, such as XGBoost(…), or use make_trainer with its name",
    )


def _raise_if_any(problems: tuple[Problem, ...]) -> None:
    if problems:
        raise InvalidJobError(problems)


def _root_exception(error: TrainingFailedError) -> BaseException | None:
    """The user's own exception, where it could travel."""
    pickled = error.failures[0].error if error.failures else None
    if pickled is None:
        return None
    try:
        cause: BaseException = pickle.loads(pickled)
    except Exception:  # its class may not exist in this process; the text is in the error already
        return None
    return cause
