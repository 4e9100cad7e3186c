"""`make_trainer` and `Trainer`: they check a job, build the run and start it."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from polytrain import satellites
from polytrain.api.backend_checks import (
    changed_virtual_workers,
    missing_options,
    raise_if_any,
    unknown_options,
)
from polytrain.api.checks import (
    checked,
    cluster_problems_now,
    damage_problems,
    fit_problems,
    job_of,
    location_of,
    start_of,
    storage_problems_of,
    unreadable_start,
)
from polytrain.api.cluster_checks import import_problems
from polytrain.api.datasets import (
    facts_of,
    identified_datasets,
    ready_datasets,
    start_problems,
)
from polytrain.api.result import Result, recorded, result_of, warn_of_damage
from polytrain.api.run_handle import RunHandle
from polytrain.api.shown import Resumption, warn
from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.configs import DataConfig, RunConfig, ScalingConfig
from polytrain.config.loop_config import name_of
from polytrain.config.run_spec import RunSpec
from polytrain.config.validation_config import ValidationConfig
from polytrain.errors import TrainingFailedError
from polytrain.functions.users_code import user_frames_only
from polytrain.linux.clock import Clock
from polytrain.policy.scaling import choose_cluster
from polytrain.policy.stop_rule import stop_rule
from polytrain.record.history import RunHistory
from polytrain.run.fit import run_to_end, storage_needed
from polytrain.run.identity import (
    content_differences,
    data_differences,
    differences,
    identity_of,
    salt_of,
    transform_fingerprint,
    with_start_of,
)
from polytrain.run.interrupts import stop_requests
from polytrain.run.lease import Lease, leased
from polytrain.run.requests import StopRequests
from polytrain.run.resume import (
    PreviousRun,
    already_met,
    checkpoint_manager,
    lost_journal_problems,
    previous_run,
)
from polytrain.run.run import Run
from polytrain.storage.calls import retries_limited
from polytrain.storage.location import Location
from polytrain.text.described import plain, with_plain_fields
from polytrain.workers.available_clusters import available_clusters, opened_cluster
from polytrain_plugins import Backend, InvalidJobError, Problem, Stopped, load_backend
from polytrain_plugins.registry import expect_usable
from polytrain_plugins.returned import demand_of
from polytrain_plugins.type_names import quoted

logger = logging.getLogger(__name__)


@user_frames_only
def make_trainer(
    backend: str,
    train_loop_per_worker: Callable[..., Any] | None = None,
    *,
    train_loop_config: Any = None,
    datasets: Mapping[str, Any] | None = None,
    dataset_config: DataConfig | Mapping[str, DataConfig] | None = None,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
    restore_from: Checkpoint | str | Path | None = None,
    validation_config: ValidationConfig | None = None,
    **options: Any,
) -> Trainer:
    """A trainer of the backend with this name.

    Args:
        backend: "torch", "xgboost", "lightgbm", "tensorflow", or any other that is installed.
        options: the backend's own, as in `Trainer(XGBoost(**options))`.

    The other arguments are those of `Trainer`.

    Raises:
        RegistryError: if the backend isn't installed or can't be imported.
        InvalidJobError: if anything is wrong with the arguments; it lists every problem.
    """
    given: Any = backend
    if not isinstance(given, str):
        raise_if_any([_no_name(given)])
    cls = load_backend(backend)
    arguments: dict[str, Any] = {
        "train_loop_per_worker": train_loop_per_worker,
        "train_loop_config": train_loop_config,
        "datasets": datasets,
        "dataset_config": dataset_config,
        "scaling_config": scaling_config,
        "run_config": run_config,
        "restore_from": restore_from,
        "validation_config": validation_config,
    }
    unknown = tuple(
        unknown_options(cls, options, arguments, has_function=train_loop_per_worker is not None)
    )
    missing = tuple(missing_options(cls, options))
    if unknown or missing:
        names = {problem.field for problem in unknown}
        known = {name: value for name, value in options.items() if name not in names}
        incomplete: Any = None if missing else cls(**plain(known))
        _, others = checked(RunSpec.of(incomplete, **arguments))
        raise InvalidJobError((*unknown, *missing, *others))
    return Trainer(cls(**options), **arguments)


class Trainer:
    """One training job. `fit` runs it.

    Args:
        backend: the framework and its options, for example `XGBoost(params=…)`.
        train_loop_per_worker: the training function; every worker calls it. If omitted, the
            backend trains from its options, if it can, or runs the script that they name.
        train_loop_config: the one argument of the training function: a dict, or an object with
            fields, such as a dataclass, an `argparse.Namespace` or a pydantic model. If omitted, a
            function that needs an argument is called with an empty dict, any other without
            arguments.
        datasets: data by name: files, tables, frames, arrays, data sets of other libraries. Every
            row is in exactly one worker's shard.
        dataset_config: which columns are read, and in which order: one for all data sets, or by
            name for each.
        scaling_config: how many workers, and the resources of each.
        run_config: name, storage, failures, checkpoints, observers.
        restore_from: the checkpoint from which a new run starts, or its directory: the model, and,
            if polytrain has made it, the place in the data.
        validation_config: the function that validates checkpoints while training continues.

    Raises:
        InvalidJobError: if anything is wrong with the arguments; it lists every problem.
        RegistryError: if the backend was written for another version of the contract.
    """

    @user_frames_only
    def __init__(
        self,
        backend: Backend,
        train_loop_per_worker: Callable[..., Any] | None = None,
        *,
        train_loop_config: Any = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | Mapping[str, DataConfig] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        restore_from: Checkpoint | str | Path | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        given: Any = backend
        if not isinstance(given, Backend):
            raise_if_any([_no_backend(given)])
        expect_usable(given)
        spec = RunSpec.of(
            with_plain_fields(backend),
            train_loop_per_worker=train_loop_per_worker,
            train_loop_config=train_loop_config,
            datasets=datasets,
            dataset_config=dataset_config,
            scaling_config=scaling_config,
            run_config=run_config,
            restore_from=restore_from,
            validation_config=validation_config,
        )
        self._datasets, problems = checked(spec)
        raise_if_any(problems)
        self._spec = spec.with_program()
        self._start: StartingPoint | None = None
        """Where a replay starts; None for the starting point of the request."""

    def __repr__(self) -> str:
        spec = self._spec
        function = spec.train_loop_per_worker
        what = [spec.backend.name, *([name_of(function)] if function is not None else [])]
        config = spec.run_config
        rest = (spec.scaling_config, RunConfig(name=config.name, storage_path=config.storage_path))
        return f"<{type(self).__name__} {', '.join(what)}, {', '.join(map(repr, rest))}>"

    @overload
    def fit(
        self, *, resume: Literal["auto", "never"] = ..., wait: Literal[True] = ...
    ) -> Result: ...

    @overload
    def fit(self, *, resume: Literal["auto", "never"] = ..., wait: Literal[False]) -> RunHandle: ...

    @user_frames_only
    def fit(
        self, *, resume: Literal["auto", "never"] = "auto", wait: bool = True
    ) -> Result | RunHandle:
        """Train, and return the result.

        If there is a run of the same name in the same storage, `fit` resumes it from its newest
        checkpoint, on any number of workers. If that run is finished, `fit` returns its result.

        After Ctrl-C, SIGTERM or SIGHUP (the terminal is closed) the run makes its next checkpoint
        and stops. Then `fit` ends the program, by an exception, and a line says how to resume the
        run. A second Ctrl-C or SIGTERM stops it at once. `Result.from_path` has the result.

        If nothing needs a cluster, workers run on this machine without Ray
        (`ScalingConfig.cluster`). If Ray is initialised, it is used as it is; otherwise `fit`
        initialises it as `ray.init()` would, and shuts it down again.

        Args:
            resume: "never" starts a run of this name over. Its earlier checkpoints stay in the
                directory and are ignored.
            wait: False returns a `RunHandle` as soon as the job is checked, and trains in a thread
                of this process. The handle raises what happens later.

        Raises:
            InvalidJobError: if the job can't run here; no worker was started.
            RunOwnedError: if another driver works on the run.
            TrainingFailedError: if training failed and wasn't restarted (again).
            KeyboardInterrupt: after Ctrl-C, when everything has been released.
            SystemExit: after SIGTERM (code 143) or SIGHUP (129), when everything has been released.
                If several signals come, the first decides.
        """
        return self._fit(resume, wait)

    def _fit(self, resume: Literal["auto", "never"], wait: bool) -> Result | RunHandle:
        clock = Clock()
        location = location_of(self._spec)
        raise_if_any(import_problems())
        raise_if_any((*fit_problems(resume, wait), *storage_problems_of(self._spec, location)))
        self._datasets = identified_datasets(self._datasets)
        resumption = Resumption(
            address=location.address,
            new_name=None if self._spec.run_config.name else location.name,
            starts_over=resume == "never",
        )
        with storage_needed(location):
            known = None if resume == "never" else previous_run(location.open())
            if known is not None and known.history is not None:
                warn_of_damage(location, known.history)
            elif known is not None:
                raise_if_any(tuple(lost_journal_problems(location)))
        origin = self._origin()
        identity = self._identity(known, origin)
        with contextlib.ExitStack() as stack:
            with storage_needed(location):
                history = self._history(location, identity, known)
                if history is None or not history.succeeded:
                    no_retry = replace(location, retry_s=0)
                    lease = stack.enter_context(
                        leased(location.open(), no_retry.open(), clock=clock)
                    )
                    if known is not None:
                        # The previous owner may have written since.
                        before, known = known, previous_run(location.open(), known=known)
                        if known is not before:
                            identity = self._identity(known, origin)
                        history = self._history(location, identity, known)
                if history is not None and history.succeeded:
                    result = self._known_result(location, history)
                    if wait:
                        return result
                    return RunHandle(
                        lambda _: result,
                        name=location.name,
                        requests=StopRequests(),
                        resumption=resumption,
                    )
            # Released before the lease is.
            cluster = stack.enter_context(contextlib.ExitStack())
            run = self._run(location, identity, origin, lease, history, cluster)
            # The run's own thread releases them, if there is one.
            held = stack.pop_all()
        if wait:
            return _trained(run, cluster, held, resumption)
        return RunHandle(
            lambda watcher: _trained(replace(run, watchers=(watcher,)), cluster, held, resumption),
            name=location.name,
            requests=run.stop_requests,
            resumption=resumption,
        )

    def _identity(self, known: PreviousRun | None, origin: StartingPoint) -> dict[str, Any]:
        history = None if known is None else known.history
        return identity_of(
            self._spec,
            datasets={dataset.name: dataset.config for dataset in self._datasets},
            facts=facts_of(self._datasets),
            start=origin.known_as,
            salt=salt_of({} if history is None else history.identity),
        )

    def _origin(self) -> StartingPoint:
        """The starting point of a new run.

        Raises:
            InvalidJobError: it can't be read.
        """
        if self._start is not None:
            return self._start
        try:
            return start_of(self._spec)
        except (OSError, ValueError) as error:
            raise InvalidJobError((unreadable_start(error),)) from error

    def _history(
        self, location: Location, identity: Mapping[str, Any], known: PreviousRun | None
    ) -> RunHistory | None:
        """The history of the run to resume; None if there is none."""
        history = None if known is None else known.history
        if history is None:
            return None
        if history.succeeded and self._is_left_to_train(history):
            history = replace(history, succeeded=None, stopped=None)
        if history.succeeded:
            return self._finished(location, history, identity)
        raise_if_any(
            tuple(
                differences(
                    history.identity,
                    identity,
                    mutable_on_resume=self._spec.backend.mutable_on_resume,
                )
            )
        )
        return history

    def _is_left_to_train(self, history: RunHistory) -> bool:
        """Whether a condition ended the run, and this call's conditions aren't met."""
        if self._spec.run_config.if_finished is not None:
            # That says what happens to a finished run, whatever has ended it.
            return False
        rule = stop_rule(self._spec.run_config)
        return history.stopped is not None and already_met(rule, history, start_step=0) is None

    def _finished(
        self, location: Location, history: RunHistory, identity: Mapping[str, Any]
    ) -> RunHistory | None:
        """The finished run, if its result is returned; None if it is trained again."""
        wanted = self._spec.run_config.if_finished
        if wanted == "error":
            raise_if_any([_is_finished(location)])
        if wanted is None:
            # A longer run is a different run: no option may differ.
            changed = tuple(differences(history.identity, identity, mutable_on_resume=()))
            raise_if_any(changed or tuple(content_differences(history.identity, identity)))
        return None if wanted == "new" else history

    def _known_result(self, location: Location, history: RunHistory) -> Result:
        """The result of a finished run, which isn't trained again."""
        logger.warning(
            "Nothing was trained: the run in %s is finished%s, and this is its result. "
            "RunConfig(if_finished='new') trains again under this name; another "
            "RunConfig(name=…) starts another run%s.",
            location.address,
            f" ({history.stopped})" if history.stopped else "",
            "; RunConfig with another condition resumes it" if history.stopped else "",
        )
        config, backend = self._spec.run_config.checkpoint_config, self._spec.backend
        # With if_finished="return" it may be the run of another one.
        is_its = history.identity["backend"] == backend.name
        return recorded(location, history, config=config, backend=backend if is_its else None)

    def _run(
        self,
        location: Location,
        identity: Mapping[str, Any],
        origin: StartingPoint,
        lease: Lease,
        history: RunHistory | None,
        cluster: contextlib.ExitStack,
    ) -> Run:
        spec = self._spec
        with storage_needed(location):
            manager = checkpoint_manager(
                spec,
                location=location,
                lease=lease,
                past=history,
                origin=origin,
                transform=transform_fingerprint(
                    {dataset.name: dataset.config for dataset in self._datasets}
                ),
            )
            start = manager.start()
        raise_if_any(changed_virtual_workers(start, spec.scaling_config.virtual_workers))
        if not start.own:
            raise_if_any(damage_problems(start))
        if history is not None and (start.own or start.skipped):
            raise_if_any(data_differences(history.identity, identity))
        if history is not None and start.own:
            # The run started where its first driver did, whatever this call names.
            identity = with_start_of(identity, history.identity)
        choice, place = None, None
        if not spec.is_inline:
            choice = choose_cluster(spec.scaling_config, available_clusters(spec))
            place = cluster.enter_context(opened_cluster(choice, spec.scaling_config))
            raise_if_any(cluster_problems_now(spec))
        demand = demand_of(spec.backend, job_of(spec, self._datasets))
        datasets, problems = ready_datasets(self._datasets, demand, spec.scaling_config)
        raise_if_any(problems)
        run = Run(
            spec=spec,
            datasets=datasets,
            demand=demand,
            cluster=place,
            choice=choice,
            location=location,
            identity=identity,
            lease=lease,
            past=history,
            manager=manager,
            start=start,
        )
        if history is not None:
            met = already_met(run.stop_rule, history, start_step=start.step)
            if met is not None:
                run.stop_requests.request(met)
        raise_if_any(start_problems(run))
        return run


def _trained(
    run: Run, cluster: contextlib.ExitStack, held: contextlib.ExitStack, resumption: Resumption
) -> Result:
    """Train, release all resources and return the result.

    Raises:
        TrainingFailedError: if training failed.
        KeyboardInterrupt: SIGINT has come.
        SystemExit: SIGTERM or SIGHUP has come.
    """
    result: Result | None = None

    def ask(signal_name: str) -> bool:
        run.stop_requests.request(Stopped(by="signal", reason=signal_name))
        return True

    def explain(signal_name: str) -> None:
        has_failed = result is not None and result.error is not None
        warn(resumption.after(signal_name, result, has_failed=has_failed))

    with (
        stop_requests(ask, explain=explain) as interrupts,
        retries_limited(lambda: interrupts.patience_s),
        held,
    ):
        run.stop_requests.end_with(interrupts.end_at_once)
        result = result_of(run, run_to_end(run, cluster, interrupts))
        if run.lease.lost is None:
            reports = sum(map(len, result.histories.values()))
            if satellites.has("page"):
                satellites.page.write_at_end(
                    run.location, wall_s=result.ledger.wall_s, reports=reports
                )
        if result.error is not None:
            raise result.error from _root_exception(result.error)
    return result


def spec_of(trainer: Trainer) -> RunSpec:
    """The arguments of a trainer."""
    return trainer._spec


def identity_in(trainer: Trainer, history: RunHistory, origin: StartingPoint) -> dict[str, Any]:
    """The identity that a trainer's request has in a run.

    Args:
        origin: the starting point of the request.
    """
    trainer._datasets = identified_datasets(trainer._datasets)
    return trainer._identity(PreviousRun(journal={}, history=history), origin)


def starting_from(start: StartingPoint, trainer: Trainer, *, spec: RunSpec) -> Trainer:
    """A copy of a trainer that starts its run at a checkpoint of another one."""
    copied = copy.copy(trainer)
    copied._start, copied._spec = start, spec
    return copied


def _no_backend(given: Any) -> Problem:
    return Problem(
        field="backend",
        what=f"{quoted(given)} is not a backend",
        remedy="Pass one, such as XGBoost(…), or use make_trainer with its name",
    )


def _no_name(given: Any) -> Problem:
    return Problem(
        field="backend",
        what=f"{quoted(given)} is not the name of a backend",
        remedy='Pass one, such as "xgboost", or the backend itself to Trainer(…)',
    )


def _is_finished(location: Location) -> Problem:
    return Problem(
        field="RunConfig.if_finished",
        what=f"it is 'error', and the run in {location.address} is finished",
        remedy="Give the run another name, or if_finished='new' to train again under this one",
    )


def _root_exception(error: TrainingFailedError) -> BaseException | None:
    """The user's own exception, if it could be pickled."""
    pickled = error.failures[0].error if error.failures else None
    if pickled is None:
        return None
    try:
        cause: BaseException = pickle.loads(pickled)
    except Exception:  # its class may not exist in this process; the error has its text
        return None
    return cause
