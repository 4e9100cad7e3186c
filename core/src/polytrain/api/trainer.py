"""The front door: what a user asks for is checked, built and handed over."""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from polytrain.api.request import (
    Request,
    checked,
    cluster_problems_now,
    damage_problems,
    job_of,
    location_of,
    resume_problems,
    start_of,
    storage_problems_of,
    surroundings_of,
)
from polytrain.api.result import Result, recorded, result_of
from polytrain.api.validation import missing_options, unknown_options
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.common.config import DataConfig, RunConfig, ScalingConfig
from polytrain.common.errors import TrainingFailedError
from polytrain.data.checks import position_problems, ready
from polytrain.data.fingerprint import fingerprint
from polytrain.policy.cluster import choose_cluster
from polytrain.run.fit import Run, run_to_end, storage_needed
from polytrain.run.history import RunHistory
from polytrain.run.identity import content_differences, differences, identity_of
from polytrain.run.lease import Lease, leased
from polytrain.run.resume import checkpoint_manager, previous_history
from polytrain.storage.location import Location
from polytrain.workers.available_clusters import opened_cluster
from polytrain_plugins import Backend, InvalidJobError, Problem, load_backend

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
    given: Any = backend
    if not isinstance(given, str):
        _raise_if_any((_no_name(given),))
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
        request = Request.of(train_loop_per_worker, **arguments)
        _, others = checked(None if missing else cls(**known), request)
        raise InvalidJobError((*unknown, *missing, *others))
    return Trainer(cls(**options), train_loop_per_worker, **arguments)


class Trainer:
    """One training job. `fit` runs it.

    Args:
        backend: the framework and its options, for example `XGBoost(params=…)`.
        train_loop_per_worker: the training function; every worker calls it. Without one, a backend
            that can trains from its options.
        train_loop_config: what the training function is called with. If omitted, a function that
            needs an argument is called with an empty dict, any other without arguments.
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
        self._request = Request.of(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            datasets=datasets,
            dataset_config=dataset_config,
            scaling_config=scaling_config,
            run_config=run_config,
            restore_from=restore_from,
        )
        self._datasets, problems = checked(backend, self._request)
        _raise_if_any(problems)

    def fit(self, *, resume: Literal["auto", "never"] = "auto") -> Result:
        """Train, and return what came of it.

        A run of the same name in the same storage is resumed, from its newest checkpoint, at
        whatever number of workers; if it is finished, its result is returned.

        Ctrl-C, or SIGTERM, lets the run make its next checkpoint and stops it there: the result
        says so, and `fit()` goes on with it. A second one stops it at once.

        Workers are on this machine, without Ray, where nothing needs a cluster
        (`ScalingConfig.cluster`). Ray is used as it is when it is initialised; otherwise it is
        initialised as `ray.init()` would, and shut down again.

        Args:
            resume: "never" starts a run of this name over. Its earlier checkpoints stay where they
                are, and don't count any more.

        Raises:
            InvalidJobError: if the job can't be run here; nothing was started.
            RunOwnedError: if another driver works on the run.
            TrainingFailedError: if training failed and was not, or no more, restarted.
            KeyboardInterrupt: on the second Ctrl-C, after everything has been released.
        """
        began = time.time()
        request, location = self._request, location_of(self._request.run, self._backend)
        _raise_if_any((*resume_problems(resume), *storage_problems_of(request, location)))
        identity = self._identity()
        with contextlib.ExitStack() as stack:
            with storage_needed(location):
                past = self._past(location, identity, resume)
                if past is None or not past.succeeded:
                    no_retry = replace(location, retry_s=0)
                    lease = stack.enter_context(leased(location.open(), no_retry.open()))
                    # Whose it was until now may have written more.
                    past = self._past(location, identity, resume)
                if past is not None and past.succeeded:
                    logger.warning(
                        "Nothing was trained: the run in %s is finished, and this is its result. "
                        "RunConfig(if_finished='new') trains again under this name; another "
                        "RunConfig(name=…) starts another run.",
                        location.address,
                    )
                    config = request.run.checkpoint_config
                    return recorded(location, past, config=config, backend=self._backend)
            # Released before the lease is.
            cluster = stack.enter_context(contextlib.ExitStack())
            run = self._run(location, identity, lease, past, began, cluster)
            result = result_of(run, run_to_end(run, cluster))
        if result.error is not None:
            raise result.error from _root_exception(result.error)
        return result

    def _identity(self) -> dict[str, Any]:
        return identity_of(
            self._backend,
            function=self._request.training_function,
            config=self._request.training_config,
            datasets={dataset.name: dataset.config for dataset in self._datasets},
            fingerprints={dataset.name: fingerprint(dataset.source) for dataset in self._datasets},
        )

    def _past(
        self, location: Location, identity: Mapping[str, Any], resume: str
    ) -> RunHistory | None:
        """What there is of the run to resume; None if nothing is."""
        past = None if resume == "never" else previous_history(location.open())
        if past is None:
            return None
        if past.succeeded:
            return self._finished(location, past, identity)
        _raise_if_any(
            tuple(
                differences(
                    past.identity, identity, mutable_on_resume=self._backend.mutable_on_resume
                )
            )
        )
        return past

    def _finished(
        self, location: Location, past: RunHistory, identity: Mapping[str, Any]
    ) -> RunHistory | None:
        """A finished run, if it is the one that is asked for; None if it is to be trained again."""
        wanted = self._request.run.if_finished
        if wanted == "error":
            _raise_if_any((_is_finished(location),))
        if wanted is None:
            # A run that is to be longer isn't the one that is finished: nothing may change.
            changed = tuple(differences(past.identity, identity, mutable_on_resume=()))
            _raise_if_any(changed or tuple(content_differences(past.identity, identity)))
        return None if wanted == "new" else past

    def _run(
        self,
        location: Location,
        identity: Mapping[str, Any],
        lease: Lease,
        past: RunHistory | None,
        began: float,
        cluster: contextlib.ExitStack,
    ) -> Run:
        request = self._request
        origin = start_of(request)
        with storage_needed(location):
            manager = checkpoint_manager(
                self._backend,
                config=request.run,
                location=location,
                world_size=max(1, request.scaling.max_workers),
                lease=lease,
                past=past,
                origin=origin,
            )
            start = manager.start()
        if not start.own:
            _raise_if_any(tuple(damage_problems(start)))
        choice, place = None, None
        if request.scaling.num_workers != 0:
            choice = choose_cluster(request.scaling, surroundings_of(request))
            place = cluster.enter_context(opened_cluster(choice))
            _raise_if_any(tuple(cluster_problems_now(request)))
        demand = self._backend.demand(job_of(request, self._datasets))
        datasets, problems = ready(self._datasets, demand, request.scaling)
        _raise_if_any(problems)
        run = Run(
            backend=self._backend,
            training_function=request.training_function,
            training_config=request.training_config,
            datasets=datasets,
            demand=demand,
            scaling=request.scaling,
            cluster=place,
            choice=choice,
            config=request.run,
            location=location,
            identity=identity,
            lease=lease,
            past=past,
            manager=manager,
            start=start,
            began=began,
        )
        field = f"datasets, for the run in {location.address}" if start.own else "restore_from"
        _raise_if_any(tuple(position_problems(run.specs, start.positions, field=field)))
        return run


_TRAINER_ARGUMENTS = (
    "train_loop_per_worker",
    "train_loop_config",
    "datasets",
    "dataset_config",
    "scaling_config",
    "run_config",
    "restore_from",
)


def _no_backend(given: Any) -> Problem:
    return Problem(
        field="backend",
        what=f"{given!r} is not a backend",
        remedy="Pass one, such as XGBoost(…), or use make_trainer with its name",
    )


def _no_name(given: Any) -> Problem:
    return Problem(
        field="backend",
        what=f"{given!r} is not the name of a backend",
        remedy='Pass one, such as "xgboost", or the backend itself to Trainer(…)',
    )


def _is_finished(location: Location) -> Problem:
    return Problem(
        field="RunConfig.if_finished",
        what=f"it is 'error', and the run in {location.address} is finished",
        remedy="Give the run another name, or if_finished='new' to train again under this one",
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
