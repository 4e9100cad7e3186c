"""What a page shows of a run: a fold of its journal and the manifests of its checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polytrain.checkpoint.manifest import Manifest
from polytrain.record.attempts import AttemptOverview
from polytrain.record.configuration import chosen, shown
from polytrain.record.run_facts import Program
from polytrain.storage.location import Location
from polytrain.view.page.curves import Metric, metrics_of
from polytrain.view.page.failures import Dump, FailureFacts, dumps_of, failure_of
from polytrain.view.present import RunRecord
from polytrain.view.ranks import RankOverview
from polytrain.view.run_state import RunState
from polytrain.view.timeline import Mark, Span, marks_of

SCHEMA_VERSION = 1
"""Of the facts as JSON; a change that breaks their readers raises it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the facts are from."""

    name: str
    path: str
    """The run's directory or address."""

    state: RunState
    driver: str | None
    """Who holds the run's lease, or held it last."""

    read: float
    """When, in seconds since the epoch."""

    version: str
    """Of polytrain, as it read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """One attempt."""

    driver: int
    """Fencing token of the driver's lease."""

    number: int
    """Which of the driver's attempts it is, from 0."""

    workers: int
    first_step: int
    """Steps that were done before."""

    resumed_from: str | None
    """The checkpoint that it started from."""

    launched: float
    """In seconds since the epoch."""

    ended: float | None
    """None if it hasn't ended, or if its driver died."""

    start: float
    stop: float
    """Of the run's own time, in seconds."""

    failure: FailureFacts | None
    reason: str
    """Why there was another attempt, or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """A checkpoint that is still kept, with what makes it valid."""

    directory: str
    path: str
    step: int
    created: str
    bytes: int
    workers: int
    metrics: Mapping[str, Any]
    versions: Mapping[str, str]
    files: tuple[Mapping[str, Any], ...]
    """Name, size in bytes and SHA-256 of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a page shows."""

    schema_version: int = SCHEMA_VERSION
    source: Source
    reason: str
    """Of the run's end; empty if it hasn't ended."""

    was_stopped: bool
    """Whether somebody, or a stop condition, ended it early."""

    validation_failure: str
    """As `Result.validation_failure`."""

    backend: str
    workers: int
    reports: int
    began: float
    """When `fit()` was first called, in seconds since the epoch."""

    seconds: Mapping[str, float]
    """`Ledger.seconds`."""

    wall_s: float
    goodput: float
    lost_steps: int
    restarts: int
    why_not_exact: tuple[str, ...] | None
    """As `Result.why_not_exact`."""

    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    attempts: tuple[AttemptFacts, ...]
    dumps: tuple[Dump, ...]
    """Stacks of ranks that hung, or that were late to leave."""

    metrics: tuple[Metric, ...]
    ranks: tuple[RankOverview, ...]
    options: Mapping[str, Any]
    """Of the backend."""

    training_config: Any
    """`train_loop_config`."""

    hyperparameters: Mapping[str, Any]
    """`train_loop_config`, and the options that aren't the backend's defaults, as one level."""

    programs: tuple[Program, ...]
    """What each driver ran: its command and the git commit of its code. The last one last."""

    nodes: tuple[str, ...]
    """The machines of the last attempt's ranks."""

    settings: Mapping[str, Any]
    """Every option of `ScalingConfig`, `RunConfig` and `ValidationConfig` of the last driver, by
    where it is set."""

    cluster: str
    """Where its workers were, and why there."""

    datasets: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    """Of the last driver."""

    checkpoints: tuple[CheckpointFacts, ...]
    """From the newest to the oldest."""

    damaged: Mapping[str, str]
    """Directory of a checkpoint that is damaged → what is wrong with it."""

    @property
    def chosen_settings(self) -> Mapping[str, Any]:
        """The settings that aren't the defaults of this version."""
        return chosen(self.settings)

    @property
    def failures(self) -> tuple[AttemptFacts, ...]:
        """The attempts that failed."""
        return tuple(each for each in self.attempts if each.failure is not None)

    @property
    def ended(self) -> float:
        """When the run's last line was written, in seconds since the epoch."""
        return self.spans[-1].time + self.spans[-1].seconds if self.spans else self.began


def facts_of(
    record: RunRecord,
    source: Source,
    manifests: Sequence[Manifest] = (),
    damaged: Mapping[str, str] | None = None,
) -> Facts:
    """Return the facts.

    Args:
        record: what the run's journal says.
        source: where that is from.
        manifests: of the kept checkpoints, oldest first.
        damaged: checkpoint → what is wrong with it.
    """
    ledger, timed = record.ledger, record.timed
    content = record.identity.get("content", {})
    return Facts(
        source=source,
        reason=record.reason,
        was_stopped=record.stopped is not None,
        validation_failure=record.validation_failure,
        backend=record.identity["backend"],
        workers=record.world_size,
        reports=len(record.reports),
        began=ledger.spans[0].time if ledger.spans else timed[0].entry.time,
        seconds=dict(ledger.seconds),
        wall_s=ledger.wall_s,
        goodput=ledger.goodput,
        lost_steps=ledger.lost_steps,
        restarts=ledger.restarts,
        why_not_exact=record.why_not_exact,
        spans=tuple(ledger.spans),
        marks=tuple(marks_of(timed)),
        attempts=tuple(_attempt(each, ledger.wall_s) for each in record.attempts),
        dumps=tuple(dumps_of(timed)),
        metrics=metrics_of(record.reports, record.undone),
        ranks=record.ranks.overviews(),
        options=shown(record.identity["options"]),
        training_config=shown(content.get("train_loop_config")),
        hyperparameters=record.facts.hyperparameters,
        programs=tuple(record.facts.programs),
        nodes=tuple(record.facts.nodes),
        settings=shown(record.configuration.options),
        cluster=record.configuration.cluster,
        datasets=_datasets(record),
        versions=_versions(record, manifests),
        checkpoints=tuple(_checkpoint(each, source.path) for each in reversed(manifests)),
        damaged=dict(damaged or {}),
    )


def _attempt(attempt: AttemptOverview, wall_s: float) -> AttemptFacts:
    return AttemptFacts(
        driver=attempt.driver,
        number=attempt.number,
        workers=attempt.num_workers,
        first_step=attempt.first_step,
        resumed_from=attempt.checkpoint,
        launched=attempt.launched,
        ended=attempt.ended,
        start=attempt.start_s,
        stop=wall_s if attempt.stop_s is None else attempt.stop_s,
        failure=None if attempt.failure is None else failure_of(attempt.failure),
        reason=attempt.reason,
    )


def _datasets(record: RunRecord) -> Mapping[str, Mapping[str, Any]]:
    facts = record.identity.get("content", {}).get("datasets", {})
    known = record.configuration.datasets
    return {
        name: {**known.get(name, {}), **options, **facts.get(name, {})}
        for name, options in record.identity["datasets"].items()
    }


def _versions(record: RunRecord, manifests: Sequence[Manifest]) -> Mapping[str, str]:
    content = record.identity.get("content", {})
    known = {"python": content["python"]} if content.get("python") else {}
    in_manifest = manifests[-1].versions if manifests else {}
    return {**known, **in_manifest, **record.configuration.versions}


def _checkpoint(manifest: Manifest, path: str) -> CheckpointFacts:
    return CheckpointFacts(
        directory=manifest.directory,
        # An address may have options behind its path.
        path=Location(address=path).below(f"checkpoints/{manifest.directory}").address,
        step=manifest.step,
        created=manifest.created,
        bytes=sum(file.size for file in manifest.files),
        workers=manifest.world_size,
        metrics=manifest.metrics,
        versions=manifest.versions,
        files=tuple(
            {"name": file.name, "bytes": file.size, "sha256": file.sha256}
            for file in manifest.files
        ),
    )
