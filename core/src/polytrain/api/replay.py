"""`Result.replay`: trains a stretch of a run again, elsewhere, and compares the two."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from polytrain.api.backend_checks import raise_if_any
from polytrain.api.checks import start_of
from polytrain.api.trainer import Trainer, identity_in, spec_of, starting_from
from polytrain.checkpoint.manager import is_good
from polytrain.checkpoint.manifest import Manifest
from polytrain.checkpoint.starting_point import StartingPoint, from_manifest
from polytrain.checkpoint.store import CheckpointStore
from polytrain.errors import CheckpointError, RunNotFoundError
from polytrain.functions.code_fingerprint import python_version
from polytrain.policy.stop_rule import STEP
from polytrain.record.history import JOURNAL, read_as
from polytrain.record.near_runs import no_run_text
from polytrain.record.repetition import (
    Replay,
    ReportedHistory,
    Stretch,
    attempts_since,
    compare,
    compare_digests,
    starting_steps,
    stretch_of,
)
from polytrain.run.identity import START, content_differences, differences
from polytrain.storage.location import Location
from polytrain_plugins import Problem

_REMEDY = "Pass what the run was trained with: a replay repeats it"


def replay(
    location: Location,
    trainer: Trainer,
    *,
    from_step: int | None,
    steps: int | None,
    storage_path: str | Path | None,
    ignore: Sequence[str],
) -> Replay:
    """Train a stretch of a run again; see `Result.replay`."""
    raise_if_any(tuple(_argument_problems(trainer, from_step, steps)))
    history = read_as(ReportedHistory, location.open().read_log(JOURNAL))
    if history is None:
        raise RunNotFoundError(no_run_text(location))
    # A line of reports that is lost shows in the numbers of those after it.
    if history.damage.lines > len(history.damage.reports):
        raise CheckpointError(
            f"{location.address} can't be replayed: {history.damage}. What is lost may say with "
            "what it was trained."
        )
    if not len(history.reports):
        raise CheckpointError(f"There is nothing to replay: {location.address} has no reports.")
    last_step = int(history.reports.steps()[-1])
    origin = start_of(spec_of(trainer))
    start = _start(location, origin, history, from_step, last_step)
    changes = _changes(trainer, history, origin, start)
    raise_if_any(tuple(_problems(trainer, history, changes, start.step)))
    stretch = stretch_of(
        history.attempts,
        start=start.step,
        end=last_step if steps is None else max(from_step or 0, start.step) + steps,
        last_step=last_step,
        changes={
            driver: " and ".join(dict.fromkeys(each.field for each in changed))
            for driver, changed in changes.items()
            if changed
        },
    )
    if stretch.end <= stretch.start:
        raise CheckpointError(
            f"There is nothing to replay: {location.address} has no reports after step "
            f"{start.step}, where the replay would start"
            + (f"; {stretch.shortened}." if stretch.shortened else ".")
        )
    _expect_reports(location, history, stretch)
    storage = location.parent if storage_path is None else Location.of(storage_path)
    with _scratch(storage, location.name) as scratch:
        kept = [each for each in history.digests if stretch.start < each <= stretch.end]
        again = _repeat(
            trainer,
            start,
            stretch,
            scratch,
            name=location.name,
            digests=kept,
            divided_for=history.divided_for,
        )
    by_survivors = {
        step: rank
        for step, rank in sorted((history.by_survivors | again.by_survivors).items())
        if stretch.start < step <= stretch.end
    }
    compared, report = compare(
        history.reports, again.reports, stretch, ignore=ignore, by_survivors=by_survivors
    )
    digests, tensor = compare_digests(history.digests, again.digests, stretch)
    found = [each for each in (tensor, report) if each is not None]
    return Replay(
        from_step=stretch.start,
        to_step=stretch.end if report is None else report.step,
        reports=compared,
        digests=digests,
        differences=tuple(sorted(found, key=lambda each: each.step)),
        not_compared=tuple(_not_compared(history, stretch, digests, by_survivors)),
    )


def _argument_problems(
    trainer: object, from_step: int | None, steps: int | None
) -> Iterable[Problem]:
    if not isinstance(trainer, Trainer):
        yield Problem(
            field="trainer",
            what=f"it is of type {type(trainer).__name__}",
            remedy="Pass a trainer with what the run was trained with: a run stores no code",
        )
    for name, value, least in (("from_step", from_step, 0), ("steps", steps, 1)):
        given: object = value
        if given is not None and (type(given) is not int or given < least):
            yield Problem(field=name, what=f"it is {given!r}", remedy=f"Give {least} or more")


def _changes(
    trainer: Trainer, history: ReportedHistory, origin: StartingPoint, start: StartingPoint
) -> Mapping[int, Sequence[Problem]]:
    """Return what differs from what each driver trained the run with, by its token.

    Args:
        origin: the starting point of the trainer's request.
        start: the starting point of the stretch.
    """
    mine = identity_in(trainer, history, origin)
    is_from_origin = start.location == origin.location
    last, mutable = history.identity["options"], spec_of(trainer).backend.mutable_on_resume
    # Such as the number of rounds: a longer run repeats the shorter one before it.
    as_last = [each for each in mutable if mine["options"].get(each) == last.get(each)]
    return {
        driver: tuple(differences(identity, mine, mutable_on_resume=as_last))
        or tuple(
            each
            for each in content_differences(identity, mine)
            if is_from_origin or each.field != START
        )
        for driver, identity in history.identities.items()
    }


def _problems(
    trainer: Trainer,
    history: ReportedHistory,
    changes: Mapping[int, Sequence[Problem]],
    start: int,
) -> Iterator[Problem]:
    """Yield what differs from what the run was trained with after a step."""
    first, *later = attempts_since(history.attempts, start)
    remedy = _REMEDY
    same = next((each.first_step for each in later if not changes[each.driver]), None)
    if same is not None:
        remedy = f"{_REMEDY}. What you pass is what it was trained with from step {same + 1} on"
    for problem in changes[first.driver]:
        yield replace(problem, remedy=remedy)
    virtual = spec_of(trainer).scaling_config.virtual_workers
    if virtual != first.virtual_workers:
        yield Problem(
            field="ScalingConfig.virtual_workers",
            what=f"the run was trained with {first.virtual_workers}, now it is {virtual}",
            remedy=_REMEDY,
        )
    failures = spec_of(trainer).run_config.failure_config
    if failures.on_rollback is not None and history.divergences.rollbacks:
        yield Problem(
            field="FailureConfig.on_rollback",
            what="the run has changed its configuration by it, which a replay doesn't repeat",
            remedy="Replay a run without rollbacks, or one whose rollbacks left batches out",
        )


def _start(
    location: Location,
    origin: StartingPoint,
    history: ReportedHistory,
    from_step: int | None,
    last_step: int,
) -> StartingPoint:
    """Return the newest intact checkpoint up to a step, or else where the run itself started.

    Args:
        origin: the starting point of the trainer's request.

    Raises:
        CheckpointError: there is no such checkpoint, and another step than 0 was asked for.
    """
    store = CheckpointStore(location=location)
    found: dict[int, Manifest] = {}
    for each in store.find(since_token=history.since_token).manifests:
        # A survivor's state may lie between two steps, and has the number of the first.
        if not each.is_rescue and is_good(each, history.divergences):
            found[each.step] = each
    start = origin
    for step in starting_steps(found, from_step, last_step):
        if not store.damage(found[step]):
            where = store.location_of(found[step].directory)
            start = from_manifest(found[step], where, own=False)
            break
    else:
        if from_step:
            there = ", ".join(map(str, sorted(found))) or "none"
            raise CheckpointError(
                f"{location.address} has no intact checkpoint at step {from_step} or before. "
                f"Steps of its checkpoints: {there}. from_step=0 repeats the run from its start."
            )
    return replace(start, skipped=history.divergences.skipped)


def _expect_reports(location: Location, history: ReportedHistory, stretch: Stretch) -> None:
    """Refuse to compare a stretch whose reports aren't all known.

    Raises:
        CheckpointError: some are missing.
    """
    missing = [each.after_step for each in history.damage.reports if each.rank == 0]
    known = max((step for step in history.reports.steps() if step <= stretch.start), default=0)
    if any(known <= step < stretch.end for step in missing):
        raise CheckpointError(
            f"{location.address} can't be replayed from step {stretch.start} to {stretch.end}: "
            f"{history.damage}. Give from_step and steps of a stretch that is known."
        )


@contextmanager
def _scratch(storage: Location, name: str) -> Iterator[Location]:
    """Make room for the replay's own files. They are kept if it fails: they say why."""
    scratch = storage.below(f"{name}.replay-{secrets.token_hex(4)}")
    yield scratch
    location = scratch.parent
    location.open().delete_below(scratch.name)


def _repeat(
    trainer: Trainer,
    start: StartingPoint,
    stretch: Stretch,
    scratch: Location,
    *,
    name: str,
    digests: Sequence[int],
    divided_for: int,
) -> ReportedHistory:
    """Train the stretch, as a run of the same name in its own storage; return its history."""
    spec = spec_of(trainer)
    scaling, config = spec.scaling_config, spec.run_config
    if scaling.virtual_workers is None and not (spec.is_inline and stretch.num_workers == 1):
        scaling = replace(scaling, num_workers=stretch.num_workers)
    again = replace(
        spec,
        scaling_config=replace(scaling, standby=0),
        validation_config=None,
        repeats=divided_for,
        run_config=replace(
            config,
            name=name,
            storage_path=scratch.address,
            storage_filesystem=scratch.filesystem,
            if_finished=None,
            # A divergence isn't avoided here, but compared.
            failure_config=replace(
                config.failure_config, on_divergence=None, divergence=None, on_rollback=None
            ),
            # Only the newest counts, and a metric that a validation returns doesn't come.
            checkpoint_config=replace(
                config.checkpoint_config,
                num_to_keep=1,
                checkpoint_score_attribute=None,
                checkpoint_score_order="max",
            ),
            stop={STEP: stretch.end},
            time_budget_s=None,
            observers=(),
            callbacks=(),
            track=None,
            # What it shows would name files that are deleted at the end.
            progress=False,
            keep_reports="rank_0",
            # At the steps at which the run has kept some.
            digests=math.gcd(*digests) or None,
        ),
    )
    starting_from(start, trainer, spec=again).fit()
    location = scratch.below(name)
    repeated = read_as(ReportedHistory, location.open().read_log(JOURNAL))
    assert repeated is not None, "fit() has opened the journal"
    return repeated


def _not_compared(
    history: ReportedHistory, stretch: Stretch, digests: int, by_survivors: Mapping[int, int]
) -> Iterator[str]:
    for step, rank in by_survivors.items():
        yield (
            f"The metrics of step {step} weren't compared: they are rank {rank}'s, because rank 0 "
            "was lost before its report"
        )
    if not digests:
        yield "Only metrics were compared: the run has kept no digests there (RunConfig.digests)"
    if stretch.shortened:
        yield f"The replay ended at step {stretch.end}: {stretch.shortened}"
    driver = attempts_since(history.attempts, stretch.start)[0].driver
    before = history.identities[driver]["content"]["python"]
    if before != python_version():
        yield (
            f"The code of functions wasn't compared: the run had Python {before}, this is "
            f"{python_version()}"
        )
