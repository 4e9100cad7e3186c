"""One run as `polytrain show` prints it, for people and for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import pairwise
from typing import Any

from polytrain.errors import next_command
from polytrain.output.metric_texts import metrics_text
from polytrain.record.attempts import AttemptOverview
from polytrain.record.configuration import changed, shown
from polytrain.record.run_facts import RunFacts
from polytrain.run.lease import Holder
from polytrain.text.described import numbered, shortened
from polytrain.trackers.state import TrackerLag, lags
from polytrain.view.cli.found import readable
from polytrain.view.cli.logs import logs_of
from polytrain.view.page.verdict import run_end
from polytrain.view.present import PresentRun
from polytrain.view.progress.text import duration, traceback_lines
from polytrain.view.ranks import RankOverview
from polytrain.view.run_state import RunState, unscored

_RANKS = 16
"""Ranks that have a line; the page and the JSON have all."""

_LONGEST = 100


def facts(run: PresentRun) -> dict[str, Any]:
    """Return what is known of a run."""
    history = run.history
    return {
        "name": run.location.name,
        "path": run.location.address,
        "state": run.state,
        "reason": history.reason,
        "validation_failure": history.validation_failure,
        "driver": run.driver,
        "backend": history.identity["backend"],
        "workers": history.world_size,
        "reports": len(history.reports),
        "last_report": history.ledger.last_report,
        "metrics": dict(history.metrics),
        "attempts": [
            {
                "driver": each.driver,
                "number": each.number,
                "workers": each.num_workers,
                "first_step": each.first_step,
                "launched": each.launched,
                "ended": each.ended,
                "failure": _failure(each),
                "traceback": None if each.failure is None else each.failure.traceback or None,
                "reason": each.reason,
            }
            for each in history.attempts
        ],
        "ranks": [asdict(each) for each in history.ranks.overviews()],
        "trackers": [asdict(each) for each in _trackers(run)],
        "hyperparameters": dict(history.facts.hyperparameters),
        "options": shown(history.identity["options"]),
        "settings": shown(history.configuration.options),
        "datasets": dict(history.configuration.datasets),
        "versions": dict(history.configuration.versions),
        "cluster": history.configuration.cluster,
        "programs": [asdict(each) for each in history.facts.programs],
        "seconds": dict(history.ledger.seconds),
        "goodput": history.ledger.goodput,
        "lost_steps": history.ledger.lost_steps,
        "damage": str(history.damage) or None,
    }


def run_lines(run: PresentRun) -> Iterator[str]:
    """Yield what is known of a run, line by line."""
    history = run.history
    configuration = history.configuration
    where = f" {configuration.cluster}" if configuration.cluster else ""
    yield f"{run.location.name}: {_verdict(run)}"
    yield f"  in         {run.location.address}"
    workers = numbered(history.world_size, "worker")
    yield f"  backend    {history.identity['backend']}, {workers}{where}"
    yield from _program(history.facts)
    for name, known in configuration.datasets.items():
        rows, columns = known.get("rows"), known.get("num_columns")
        counts = (
            "an unknown number of rows" if rows is None else numbered(rows, "row"),
            "? columns" if columns is None else numbered(columns, "column"),
        )
        yield f"  data set   {name}: {', '.join(counts)}"
    versions = [f"{name} {version}" for name, version in configuration.versions.items()]
    if versions:
        yield f"  versions   {', '.join(versions)}"
    metrics = metrics_text(history.metrics) or "none"
    yield f"  reports    {len(history.reports)}: {metrics}{_age(run)}"
    if history.damage:
        yield f"  damage     {history.damage}"
    for tracker in _trackers(run):
        if tracker.lacks:
            behind = numbered(tracker.lacks, "step")
            yield f"  tracker    {tracker.name} is {behind} behind: it has step {tracker.step}"
        if tracker.damage:
            yield f"  damage     {tracker.damage}"
    yield ""
    if history.facts.hyperparameters:
        yield "hyperparameters"
        yield from _hyperparameters(history.facts)
        yield ""
    if configuration.options:
        settings = history.facts.settings
        yield "settings that aren't the defaults" if settings else "settings: the defaults"
        yield from _assigned(settings)
        yield ""
    yield "attempts"
    for each in history.attempts:
        yield f"  {_attempt(each)}"
        if each.failure is not None:
            message, *more = f"{_failure(each)} ({each.reason})".split("\n")
            yield f"      {message}"
            yield from (f"        {line}" for line in more)
            yield from (f"    {line}" for line in traceback_lines(each.failure))
    yield from _next_command(run)
    yield ""
    ranks = history.ranks.overviews()
    if ranks:
        yield from _ranks(ranks)
        yield ""
    yield from str(history.ledger).split("\n")


def _trackers(run: PresentRun) -> Sequence[TrackerLag]:
    with readable(run.location):
        return lags(run.location.open(), run.entries(), since=run.history.since_token)


def _failure(attempt: AttemptOverview) -> str | None:
    failure = attempt.failure
    if failure is None:
        return None
    rank = "" if failure.rank is None else f"rank {failure.rank}: "
    return f"{failure.kind.name}: {rank}{failure.message}"


def _next_command(run: PresentRun) -> Iterator[str]:
    failures = [each.failure for each in run.history.attempts if each.failure is not None]
    if run.state is not RunState.FAILED or not failures:
        return
    rank = failures[-1].rank
    if rank is not None and logs_of(run, rank):
        command = next_command(run.location.address, rank, has_output=True)
        yield f"      to see more: {command}"


def _program(facts: RunFacts) -> Iterator[str]:
    program = facts.program
    if program.command:
        yield f"  command    {shortened(shlex.join(program.command), _LONGEST)}"
    if program.code:
        yield f"  code       {program.code}"
    for before, after in pairwise(facts.programs):
        if before.code and before.code != after.code:
            yield f"             until driver {after.driver}: {before.code}"


def _hyperparameters(facts: RunFacts) -> Iterator[str]:
    earlier = [
        (after.driver, changed(before.hyperparameters, after.hyperparameters))
        for before, after in pairwise(facts.programs)
    ]
    for name, value in facts.hyperparameters.items():
        yield from _assigned({name: value})
        for driver, values in earlier:
            if name in values:
                yield f"      until driver {driver}: {_as_json(values[name][0])}"


def _assigned(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield f"  {name} = {_as_json(value)}"


def _as_json(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False, default=str), _LONGEST)


def _ranks(ranks: Sequence[RankOverview]) -> Iterator[str]:
    yield "ranks"
    for each in ranks[:_RANKS]:
        known = [each.place, each.computes_on]
        if each.rows:
            known.append(f"{each.rows_in_short} rows")
        if each.busy is not None:
            known.append(f"busy {each.busy:.0%}")
        if each.cpu is not None:
            known.append(f"CPU {each.cpu:.0%}")
        if each.memory is not None:
            known.append(f"{each.memory / 2**20:.0f} MiB")
        if each.gpu is not None:
            known.append(f"GPU {each.gpu:.0%}")
        if each.gpu_memory is not None:
            known.append(f"GPU memory {each.gpu_memory / 2**20:.0f} MiB")
        yield f"  {each.rank:<3}  {', '.join(each for each in known if each)}".rstrip()
    if len(ranks) > _RANKS:
        yield f"  {len(ranks) - _RANKS} more are in --json"


def _verdict(run: PresentRun) -> str:
    end = run_end(
        run.state,
        seconds=run.history.ledger.wall_s,
        reason=run.history.reason,
        was_stopped=run.history.stopped is not None,
        driver=run.driver,
    )
    if run.state is not RunState.RUNNING:
        return f"{end}{unscored(run.history.validation_failure)}"
    return f"{end}: {run.driver}{_last_heartbeat(run.holder)}"


def _age(run: PresentRun) -> str:
    """How long ago the last report of an active run was made: a run that stalls is seen by it."""
    last = run.history.ledger.last_report
    if last is None or run.holder is None or run.state is not RunState.RUNNING:
        return ""
    return f", {_ago(run.holder, last)}"


def _last_heartbeat(owner: Holder | None) -> str:
    if owner is None or owner.is_held is not None or not owner.beat_at:
        return ""
    return f", last heartbeat {_ago(owner, owner.beat_at)}"


def _ago(owner: Holder, then: float) -> str:
    return f"{duration(max(0.0, owner.now() - then))} ago"


def _attempt(attempt: AttemptOverview) -> str:
    launched = datetime.fromtimestamp(attempt.launched)
    took = "" if attempt.ended is None else f", {attempt.ended - attempt.launched:.1f} s"
    return (
        f"{attempt.driver}.{attempt.number}  {launched:%Y-%m-%d %H:%M:%S}{took}, "
        f"{numbered(attempt.num_workers, 'worker')}, after {numbered(attempt.first_step, 'step')}"
    )
