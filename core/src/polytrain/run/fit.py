"""A run in one driver, from start to end: acquires and releases all its resources."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from polytrain import satellites
from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import storage_message
from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import Failure, FailureKind, TrainingFailedError
from polytrain.functions.return_values import Returned
from polytrain.output.call_queues import CallQueues
from polytrain.output.observers import Observers, follow_record, installed_observers, is_called
from polytrain.output.queued_records import queued_records
from polytrain.output.worker_output import LiveBars
from polytrain.record.configuration import (
    Configuration,
    changed,
    datasets_of,
    hyperparameters_of,
    options_of,
    shown,
)
from polytrain.record.entries import Opened
from polytrain.record.history import RunHistory
from polytrain.record.journal import Journal, News
from polytrain.record.ledger import Ledger
from polytrain.run.assembly import controller_of
from polytrain.run.controller import Controller
from polytrain.run.interrupts import Interrupts
from polytrain.run.left_state import keep_state
from polytrain.run.program import command_line, script
from polytrain.run.resume import function_fingerprint, unreported, versions_of
from polytrain.run.run import Run
from polytrain.run.states import Conclude
from polytrain.storage.location import Location
from polytrain.storage.protocol import StorageError
from polytrain.text.described import first_few
from polytrain_plugins import CheckpointInfo, Outcome

logger = logging.getLogger(__name__)

_CHANGES = 5
"""Changed hyperparameters that are named when a run is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The outcome of a run, over all its drivers."""

    record: RunHistory
    conclusion: Conclude
    newest: CheckpointInfo | None
    """The newest intact checkpoint."""

    best: tuple[CheckpointInfo, ...]
    """The kept checkpoints, from best to worst."""

    returned: tuple[Returned | None, ...]
    """Return value of each rank's training function; empty if none returned anything."""

    error: TrainingFailedError | None


@contextlib.contextmanager
def storage_needed(location: Location) -> Iterator[None]:
    """Turn errors of the run's storage into a failure of the run.

    Raises:
        TrainingFailedError: the storage can't be used.
    """
    try:
        yield
    except OSError as error:
        failed = _storage_failed(location, error)
        raise TrainingFailedError(failed.reason, failed.failures, path=location.address) from error


def run_to_end(run: Run, held: contextlib.ExitStack, interrupts: Interrupts) -> RunOutcome:
    """Run, release all resources, and return the outcome, with an error if the run failed.

    Args:
        interrupts: receives signals from before the run starts until it has ended.
    """
    past = RunHistory(since_token=run.lease.token) if run.past is None else run.past
    bars = LiveBars()
    with (
        CallQueues(is_urgent=lambda: interrupts.are_urgent) as queues,
        queued_records(queues),
        _followers(run, past.ledger, queues, bars, interrupts) as news,
        _journal(run, past, news) as journal,
    ):
        try:
            return _run_to_end(run, journal, queues, bars, interrupts)
        finally:
            held.close()
            journal.closed()


def _run_to_end(
    run: Run, journal: Journal, queues: CallQueues, bars: LiveBars, interrupts: Interrupts
) -> RunOutcome:
    slow = _queues_of_hooks(run, queues, interrupts)
    observers = Observers(
        _observers(run), stop=run.stop_requests.request, queues=slow, at_once=run.watchers
    )
    outcome = Outcome(succeeded=False, reason="interrupted", restarts=0)
    try:
        with contextlib.ExitStack() as stack:
            controller = controller_of(
                run, journal, observers, queues, slow, bars, interrupts, stack
            )
            conclusion = _concluded(run, controller, interrupts)
            outcome = Outcome(
                succeeded=conclusion.succeeded,
                reason=conclusion.reason,
                restarts=controller.journal.history.ledger.restarts,
                planned=conclusion.succeeded or conclusion.stopped is not None,
                failures=controller.publisher.failure_infos(conclusion.failures),
                stopped=conclusion.stopped,
            )
        return _outcome(run, controller, conclusion)
    finally:
        _tidy(run)
        observers.run_ended(run.info, outcome)
        observers.finish()


def _queues_of_hooks(run: Run, queues: CallQueues, interrupts: Interrupts) -> CallQueues:
    """Return the queues for the user's hooks; an inline run calls them in the training thread."""
    if run.spec.is_inline:
        return CallQueues(at_once=True, around=interrupts.allowed)
    return queues


def _concluded(run: Run, controller: Controller, interrupts: Interrupts) -> Conclude:
    request = interrupts.ask

    def ask(signal_name: str) -> bool:
        # An inline training function runs in this thread: only an exception can end it.
        ends_by_itself = not run.spec.is_inline or controller.state.saves
        return ends_by_itself and request(signal_name)

    interrupts.ask = ask
    try:
        controller.publisher.run_started()
        return controller.conclude()
    except KeyboardInterrupt:
        if interrupts.first is not None:
            # The interrupt is what the program gets.
            with contextlib.suppress(StorageError):
                keep_state(controller)
        raise
    except StorageError as error:
        # The journal and the manifests remain, so the run can be resumed. Don't retry for the logs:
        # they are in the same storage.
        controller.output.retry_s = 0.0
        newest = controller.checkpoints.manager.newest()
        has = f"that of step {newest.step}" if newest else "none"
        return _storage_failed(run.location, error, f"; the newest checkpoint there: {has}")
    finally:
        interrupts.phase = "ending"


def _storage_failed(location: Location, error: OSError, also: str = "") -> Conclude:
    failure = Failure(kind=FailureKind.STORAGE, rank=None, message=storage_message(error, location))
    reason = f"the storage of the run, {location.address}, has failed{also}"
    return Conclude(succeeded=False, reason=reason, failures=(failure,))


def _tidy(run: Run) -> None:
    """Delete uncommitted files. An error is only logged: the next driver deletes them too."""
    if run.lease.is_gone:
        # What lies there is another run's.
        return
    no_retry = CheckpointStore(location=replace(run.location, retry_s=0))
    last = AttemptId(token=run.lease.token + 1, attempt=0)
    try:
        no_retry.clear_staging(before=last)
        no_retry.sweep(before=last)
    except OSError as error:
        logger.warning("Uncommitted files can't be deleted: %s", error)


@contextlib.contextmanager
def _followers(
    run: Run, ledger: Ledger, queues: CallQueues, bars: LiveBars, interrupts: Interrupts
) -> Iterator[News]:
    """Attach the followers of the run's record: trackers, and the progress display."""
    config = run.spec.run_config
    news = News()
    with contextlib.ExitStack() as stack:
        if follow_record(config.track, config.observers):
            tracking = satellites.trackers.followed(run, ledger, lambda: interrupts.are_urgent)
            news.subscribe(stack.enter_context(tracking))
        if config.progress not in (False, "none") and satellites.has("progress"):
            shown = satellites.progress.shown_progress(
                run.info,
                config.progress,
                ledger,
                now=run.lease.clock.now,
                queues=queues,
                bars=bars,
            )
            news.subscribe(stack.enter_context(shown))
        yield news


@contextlib.contextmanager
def _journal(run: Run, past: RunHistory, news: News) -> Iterator[Journal]:
    ranking = run.spec.run_config.checkpoint_config
    before = past.configuration
    with storage_needed(run.location):
        opened = Journal(
            run.location.open(),
            token=run.lease.token,
            history=past,
            news=news,
            clock=run.lease.clock,
        )
    with opened as journal:
        with storage_needed(run.location):
            journal.write(
                Opened(
                    anew=run.past is None,
                    identity=run.identity,
                    world_size=run.spec.world_size,
                    began=journal.clock.began,
                    ranking=(ranking.checkpoint_score_attribute, ranking.checkpoint_score_order),
                    total_steps=run.total_steps,
                    time_budget_s=run.spec.run_config.time_budget_s,
                    stop_function=function_fingerprint(run.stop_rule.function),
                    configuration=_configuration(run),
                )
            )
        if run.past is not None:
            _warn_of_changes(before, journal.history.configuration)
        yield journal


def _warn_of_changes(before: Configuration, now: Configuration) -> None:
    differing = changed(shown(before.hyperparameters), shown(now.hyperparameters))
    values = [f"{name} = {is_!r} (before: {was!r})" for name, (was, is_) in differing.items()]
    if values:
        logger.warning(
            "The run is resumed with other hyperparameters: %s.", first_few(values, _CHANGES)
        )


def _configuration(run: Run) -> Configuration:
    spec, is_on_ray = run.spec, run.choice is not None and not run.choice.is_local
    return Configuration(
        options=options_of(
            run.spec.scaling_config, run.spec.run_config, run.spec.validation_config
        ),
        datasets=datasets_of(run.datasets),
        versions=versions_of(spec.backend, "numpy", "pyarrow", *(["ray"] if is_on_ray else [])),
        cluster=run.info.cluster,
        hyperparameters=hyperparameters_of(spec.train_loop_config, spec.backend),
        command=command_line(),
        script=script(),
    )


def _observers(run: Run) -> list[Any]:
    given = [each for each in run.spec.run_config.observers if is_called(each)]
    installed = installed_observers() if run.spec.repeats is None else []
    return [*run.watchers, *installed, *given]


def _outcome(run: Run, controller: Controller, conclusion: Conclude) -> RunOutcome:
    manager = controller.checkpoints.manager
    if conclusion.validation_failure:
        logger.warning(
            "The run is finished, and no checkpoint has a score: %s.", conclusion.validation_failure
        )
    reports = controller.journal.history.reports
    for sentence in unreported(run.stop_rule, controller.divergence_rule, reports):
        logger.warning("%s", sentence)
    error = None
    if not (conclusion.succeeded or conclusion.stopped):
        root, output = next(iter(conclusion.failures), None), controller.output
        error = TrainingFailedError(
            conclusion.reason,
            conclusion.failures,
            path=run.location.address,
            log=output.log_of(root) if root else "",
            host=controller.host_of(root.rank) if root else "",
            last_lines=output.last_lines(root) if root else (),
        )
        # If the storage has failed, don't retry it again.
        manager.store = CheckpointStore(location=replace(run.location, retry_s=0))
    newest = None
    try:
        with storage_needed(run.location):
            if run.lease.lost is None:
                newest = manager.newest_intact()
            elif not run.lease.is_gone:
                # The other driver may delete it at any time.
                newest = manager.newest()
    except TrainingFailedError as unreadable:
        if error is None:
            raise
        logger.warning("The run's checkpoints can't be read now: %s", unreadable.failures[0])
        newest = manager.newest()
    return RunOutcome(
        record=controller.journal.history,
        conclusion=conclusion,
        newest=newest,
        best=() if run.lease.is_gone else tuple(manager.best()),
        returned=controller.publisher.returned
        if conclusion.succeeded and not conclusion.stopped
        else (),
        error=error,
    )
