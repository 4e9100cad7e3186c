"""Reads what earlier drivers of a run left: history, checkpoints, and conditions that are met."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polytrain.checkpoint.manager import CheckpointManager
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config.run_spec import RunSpec
from polytrain.functions.code_fingerprint import code_fingerprint
from polytrain.policy.divergence import DivergenceRule
from polytrain.policy.stop_rule import STEP, StopRule
from polytrain.record.history import JOURNAL, RunHistory, read_history
from polytrain.record.reports import Reports
from polytrain.run.lease import Lease
from polytrain.storage.location import Location
from polytrain.storage.protocol import Storage
from polytrain.text.metrics import named_metric
from polytrain.workers.agents.node_checks import installed_versions
from polytrain_plugins import Backend, Problem, Report, Stopped
from polytrain_plugins.close_names import did_you_mean

logger = logging.getLogger(__name__)


def checkpoint_manager(
    spec: RunSpec,
    *,
    location: Location,
    lease: Lease,
    past: RunHistory | None,
    origin: StartingPoint,
    transform: str | None,
) -> CheckpointManager:
    """Return the manager of the run's checkpoints, with those of earlier drivers.

    Args:
        lease: this driver's lease.
        transform: see `Manifest.transform`.

    Raises:
        OSError: the storage can't be read.
    """
    store = CheckpointStore(location=location)
    manager = CheckpointManager(
        store=store,
        config=spec.run_config.checkpoint_config,
        backend=spec.backend.name,
        kind=spec.checkpoint_kind,
        merges_files=spec.merges_files,
        versions=versions_of(spec.backend),
        world_size=spec.world_size,
        virtual_workers=spec.scaling_config.virtual_workers,
        token=lease.token,
        origin=origin,
        transform=transform,
        clock=lease.clock,
    )
    if past is not None:
        manager.validations = past.validations
        manager.divergences = past.divergences
        found = store.find(since_token=past.since_token)
        newest = past.newest_commit
        if newest is not None and found.lacks(newest.checkpoint):
            logger.warning(
                "The run's newest checkpoint, of step %d, is gone: its journal names %s. The run "
                "resumes from %s.",
                newest.step,
                store.location_of(newest.checkpoint).address,
                f"that of step {found.manifests[-1].step}" if found.manifests else "its start",
            )
        manager.take_over(found)
    return manager


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousRun:
    """The record of a run by its earlier drivers."""

    journal: Mapping[str, int]
    """The journal's files and their sizes, which change with every line."""

    history: RunHistory | None
    """The history; None if there was no driver."""


def previous_run(storage: Storage, *, known: PreviousRun | None = None) -> PreviousRun:
    """Read the journal.

    Args:
        known: the last result, which is returned if the journal hasn't changed.

    Raises:
        OSError: the storage can't be read.
    """
    # Get the state before reading, so that the next call notices lines written meanwhile.
    journal = storage.log_state(JOURNAL)
    if known is not None and known.journal == journal:
        return known
    return PreviousRun(journal=journal, history=read_history(storage.read_log(JOURNAL)))


def lost_journal_problems(location: Location) -> Iterator[Problem]:
    """Yield a problem if a run has checkpoints, although its journal doesn't tell of any driver.

    Raises:
        CheckpointError: another version of polytrain wrote a manifest.
        OSError: the storage failed.
    """
    store = CheckpointStore(location=location)
    manifests = store.find(since_token=0).manifests
    if manifests:
        newest = manifests[-1]
        yield Problem(
            field="RunConfig.name",
            what=f"the run in {location.address} has checkpoints until step {newest.step}, and "
            f"can't be resumed: its {JOURNAL} is missing, empty or damaged",
            remedy="Bring the journal back; or train under another name with "
            f"restore_from={store.location_of(newest.directory).address!r}; or start over with "
            "fit(resume='never')",
        )


def versions_of(backend: Backend, *others: str) -> dict[str, str]:
    """Return the versions of Python, polytrain and the backend's requirements in this process.

    Args:
        others: more distributions, if they are installed.
    """
    return installed_versions(("polytrain-core", *backend.requires, *others))


def already_met(rule: StopRule, history: RunHistory, *, start_step: int) -> Stopped | None:
    """Return the condition that a run meets without further training; None if it meets none.

    Args:
        rule: the conditions of this call of `fit()`.
        start_step: the step of the checkpoint from which training would resume; later reports
            are lost.
    """
    steps = history.reports.steps()
    last = int(steps[-1]) if len(steps) else 0
    stopped = rule.budget_met_by(history.ledger.trained_s(), step=last)
    if stopped is not None:
        return stopped
    # A run that has ended by a condition may have no checkpoint.
    counts_until = math.inf if history.succeeded else start_step
    met = history.condition
    if met is not None and (met.step or 0) <= counts_until and _is_met_again(rule, met, history):
        return met
    newest = history.validations.newest
    if newest is not None and newest.step <= counts_until:
        # It may have ended after the condition was met, and be of an earlier step than the last.
        stopped = rule.limit_met_by(newest.step, newest.metrics)
        if stopped is not None:
            return stopped
    if len(steps) and last <= counts_until:
        return rule.limit_met_by(last, history.reports[-1])
    return None


def function_fingerprint(function: Callable[[Report], bool] | None) -> str | None:
    """Return the fingerprint of a function in `RunConfig.stop`; None if there is none."""
    return None if function is None else code_fingerprint(function)


def unreported(
    rule: StopRule, divergence: DivergenceRule | None, reports: Reports
) -> Iterator[str]:
    """Yield a sentence for each metric that a rule is about, and no report has as a number.

    Args:
        reports: rank 0's reports; if there are none, nothing is yielded.
    """
    if not len(reports):
        return
    known = reports.names()
    limits = [limit.metric for limit in rule.limits if limit.metric != STEP]
    looked_at = divergence.named if divergence is not None else ()
    for what, name in (
        *((f"RunConfig.stop[{name!r}] was never met", name) for name in limits),
        *((f"FailureConfig.divergence never saw {name!r}", name) for name in looked_at),
    ):
        if any(_is_number(metrics, name) for metrics in _with(reports, name)):
            continue
        names = ", ".join(map(repr, known)) or "none"
        yield (
            f"{what}: no report of rank 0 had a number of this name. The reported metrics are "
            f"{names}. {did_you_mean(name, known)}".strip()
        )


def _is_met_again(rule: StopRule, met: Stopped, history: RunHistory) -> bool:
    """Return whether the value or function that ended the run also meets this rule."""
    if met.metric and met.value is not None and met.step is not None:
        return rule.limit_met_by(met.step, {met.metric: met.value}) is not None
    is_function = not met.metric and met.value is None
    return (
        is_function
        and rule.function is not None
        and function_fingerprint(rule.function) == history.stop_function
    )


def _with(reports: Reports, name: str) -> Iterator[Any]:
    known = reports.names()
    if name in known or name.partition("/")[0] in known:
        yield from reports


def _is_number(metrics: Any, name: str) -> bool:
    try:
        return isinstance(named_metric(metrics, name), int | float)
    except KeyError:
        return False
