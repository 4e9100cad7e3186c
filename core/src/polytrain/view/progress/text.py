"""A run's progress as text for people: two lines of state, and a line for each event. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from polytrain.checkpoint.store import CHECKPOINTS
from polytrain.errors import Failure, next_command
from polytrain.output.echo import Style, painted, without_colours
from polytrain.output.line_layout import Segment, columns, cut, fitted, printable
from polytrain.output.metric_texts import metric_texts, name_text, value_text
from polytrain.record.entries import AttemptEnded, Entry, Launched, RankJoined, RunConcluded
from polytrain.record.progress import Progress, Stage
from polytrain.text.described import numbered
from polytrain.view.run_state import unscored
from polytrain_plugins import RunInfo

_CAUSE_WIDTH, _LEAST_CAUSE = 80, 24
_TRACEBACK_LINES = 40
_LATE_AFTER_S = 2.0
"""Seconds after which it is said how long ago the last report was."""

_FEW_RANKS = 4
"""With more ranks, not every share is written as a number."""

_BAR_RANKS = 16
"""With more ranks, each has no bar of its own."""

_RANK = re.compile(r"\A\(rank \d+\)")
_RESTARTS = re.compile(r"\b\d+ restarts?\b")

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What lines are written with, besides letters."""

    separator: str
    mark: str
    """Stands for what is left out."""

    bars: str
    """From the least to the most; empty where shares are written as numbers."""


UNICODE = Signs(separator=" · ", mark="…", bars="▁▂▃▄▅▆▇█")
ASCII = Signs(separator=", ", mark="...", bars="")
PLAIN = Signs(separator=", ", mark="…", bars="")
"""For lines that stay, which people search."""


def signs_for(encoding: str | None) -> Signs:
    """Return the signs that a stream of this encoding can show."""
    try:
        f"{UNICODE.separator}{UNICODE.mark}{UNICODE.bars}".encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return UNICODE


def state_lines(
    run: RunInfo, progress: Progress, *, now: float, width: int, signs: Signs = UNICODE
) -> tuple[str, str]:
    """Return what a run is doing, as two lines.

    Args:
        now: seconds since the epoch.
        width: columns of a line.
        signs: what the stream can show.
    """
    first = [Segment(text=_name(run, width), weight=2), *_state(progress, now, signs)]
    return (
        fitted(first, width, separator=signs.separator, mark=signs.mark),
        fitted(
            list(_world(progress, now, signs)), width, separator=signs.separator, mark=signs.mark
        ),
    )


def bar_lines(
    bars: Sequence[tuple[int, str]], world_size: int, *, width: int, signs: Signs = UNICODE
) -> list[str]:
    """Return progress bars of the ranks as lines, with the rank if there is more than one.

    Args:
        bars: ranks, and a row of a bar of each.
        world_size: the number of ranks.
        width: columns of a line.
        signs: what the stream can show.
    """
    prefixes = [f"(rank {rank}) " if world_size > 1 else "" for rank, _ in bars]
    return [
        cut(f"{prefix}{printable(without_colours(row))}", width, mark=signs.mark)
        for prefix, (_, row) in zip(prefixes, bars, strict=True)
    ]


def heartbeat(run: RunInfo, progress: Progress, *, now: float) -> str:
    """Return what a run is doing as one line, of any length."""
    parts = [*_state(progress, now, PLAIN), *_world(progress, now, PLAIN)]
    return f"{run.name}: {PLAIN.separator.join(part.text for part in parts if part.text)}"


def started(run: RunInfo) -> str:
    """Return the first line of a run."""
    count = numbered(run.num_workers, "worker")
    workers = f"{count} {run.cluster}" if run.num_workers else "inline"
    return f"{run.name}: starting ({workers}), in {run.path}"


def event_lines(run: RunInfo, progress: Progress, entry: Entry) -> Iterator[str]:
    """Yield the lines that a line of the journal is worth: most are worth none.

    Args:
        progress: its progress, with this line.
        entry: the line.
    """
    match entry:
        case Launched() if progress.ledger.launches > 1 or entry.start:
            which = f"restart {progress.restarts}: " if progress.restarts else ""
            yield f"{run.name}: {which}{_source(entry.start, entry.step)}"
        case RankJoined() if progress.stage is Stage.TRAINING:
            yield f"{run.name}: training on {numbered(progress.world_size, 'rank')}"
        case AttemptEnded() if progress.last_failed is not None:
            # `fit()` raises it, with the same lines, unless the run was stopped.
            return
        case RunConcluded() if progress.last_failed is not None and entry.stopped:
            yield from failure_lines(run, progress.last_failed)
        case AttemptEnded() if entry.failure is not None:
            yield from failure_lines(run, entry)
        case AttemptEnded() if entry.reason:
            yield f"{run.name}: attempt {entry.attempt} ended as planned: {entry.reason}"


def event_style(entry: Entry) -> Style:
    """Return how the lines of `event_lines` stand out."""
    match entry:
        case AttemptEnded(failure=Failure()) | RunConcluded(succeeded=False):
            return Style.BAD
        case AttemptEnded() | Launched():
            return Style.CHANGED
        case _:
            return Style.PLAIN


def end_style(progress: Progress) -> Style:
    """Return how the first line of `ended` stands out."""
    concluded = progress.concluded
    if concluded is None or (concluded.stopped and not concluded.succeeded):
        return Style.CHANGED
    return Style.GOOD if concluded.succeeded else Style.BAD


def state_styled(lines: Sequence[str], *, signs: Signs) -> list[str]:
    """Return printable lines with colours: bars, and the two of `state_lines`.

    Args:
        signs: what they are written with.
    """
    *bars, first, second = lines
    name, separator, rest = first.partition(signs.separator)
    return [
        *(_RANK.sub(lambda found: painted(found.group(), Style.DIM), bar) for bar in bars),
        f"{painted(name, Style.BOLD)}{separator}{rest}",
        _RESTARTS.sub(lambda found: painted(found.group(), Style.CHANGED), second, count=1),
    ]


def failure_lines(run: RunInfo, ended: AttemptEnded) -> Iterator[str]:
    """Yield what has failed, the end of that rank's output, and the command that shows more."""
    failure = ended.failure
    if failure is None:
        return
    step = f", after step {failure.step}" if failure.step else ""
    yield f"{run.name}: failed: {printable(str(failure))}{step} ({ended.reason})"
    yield from traceback_lines(failure)
    for line in failure.last_lines:
        yield f"    {printable(line)}"
    yield f"  more: {command(run, failure)}"


def traceback_lines(failure: Failure) -> Iterator[str]:
    """Yield the rank's traceback, indented; of a long one the end."""
    lines = failure.traceback.rstrip().split("\n") if failure.traceback else []
    if len(lines) > _TRACEBACK_LINES:
        yield f"    … {numbered(len(lines) - _TRACEBACK_LINES, 'line')} before"
    yield from (f"    {printable(line)}" for line in lines[-_TRACEBACK_LINES:])


def ended(run: RunInfo, progress: Progress) -> Iterator[str]:
    """Yield the last lines of a run, after its driver has released everything."""
    restarts = f", {numbered(progress.restarts, 'restart')}" if progress.restarts else ""
    took = f" after {duration(progress.ledger.wall_s)}{restarts}"
    concluded = progress.concluded
    if concluded is None:
        yield f"{run.name}: interrupted{took}"
    elif concluded.succeeded:
        why = f" ({concluded.reason})" if concluded.stopped else ""
        end = printable(unscored(concluded.validation_failure))
        yield f"{run.name}: finished{took}{why}{end}"
    else:
        verdict = "stopped" if concluded.stopped else "failed"
        yield f"{run.name}: {verdict}{took}: {concluded.reason}"
        if not concluded.stopped:
            # The exception that `fit()` raises has the rest.
            return
    if progress.step:
        metrics = metric_texts(progress.metrics)
        # A resumed run that has reported nothing yet has a step, and no metrics.
        yield f"  step {progress.step}{': ' if metrics else ''}{', '.join(metrics)}"
    if progress.best is not None:
        name, value, step = progress.best
        yield f"  best {name_text(name)}: {value_text(value)}, of step {step}"
    if concluded is not None and concluded.why_not_exact:
        yield f"  exact over world sizes: no, {printable('; '.join(concluded.why_not_exact))}"
    if progress.checkpoint:
        place = f"{run.path}/{CHECKPOINTS}/{progress.checkpoint}"
        yield f"  checkpoint of step {progress.committed}: {place}"
    yield f"  more: {next_command(run.path, None, has_output=False)}"


def command(run: RunInfo, failure: Failure) -> str:
    """Return the command that shows more of a failure: the rank's output if any, or the run."""
    return next_command(run.path, failure.rank, has_output=bool(failure.last_lines))


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    if seconds < 2 * _DAY_S:
        hours, rest = divmod(int(seconds), _HOUR_S)
        return f"{hours} h {rest // _MINUTE_S:02d} min"
    days, rest = divmod(int(seconds), _DAY_S)
    return f"{days} d {rest // _HOUR_S} h"


def _source(checkpoint: str | None, step: int) -> str:
    if checkpoint is None:
        return "starts from the beginning"
    return f"resumes after step {step}, from {PurePosixPath(checkpoint).name}"


def _state(progress: Progress, now: float, signs: Signs) -> Iterator[Segment]:
    if progress.stage is not Stage.TRAINING or not progress.has_reported:
        yield Segment(text=_waits(progress, now), weight=10)
        if not progress.step:
            return
    total = f" of {progress.total}" if progress.total is not None else ""
    yield Segment(text=f"step {progress.step}{total}", weight=9)
    if progress.repeats_until is not None:
        yield Segment(text=f"repeating up to {progress.repeats_until}", weight=8)
    yield Segment(text=_rate(progress.steps_per_s), weight=5)
    unreported_s = progress.unreported_s(now)
    if unreported_s is not None and unreported_s >= _LATE_AFTER_S:
        since = duration(unreported_s)
        is_overdue = progress.is_overdue(now)
        text = f"no step for {since}" if is_overdue else f"reported {since} ago"
        yield Segment(text=text, weight=8)
    left_s = progress.left_s(now)
    if left_s is not None:
        yield Segment(text=f"{duration(left_s)} left", weight=7)
    for place, text in enumerate(metric_texts(progress.metrics, mark=signs.mark)):
        yield Segment(text=text, weight=6 if place == 0 else 1)
    if progress.committed is not None:
        yield Segment(text=f"saved {progress.committed}", weight=4)


def _world(progress: Progress, now: float, signs: Signs) -> Iterator[Segment]:
    busy = _busy(progress.busy, signs)
    ranks = numbered(progress.world_size, "rank")
    yield Segment(text=f"{ranks} {busy}".rstrip(), weight=5)
    if progress.stopping:
        why = f"stops after its next checkpoint: {printable(progress.stopping)}"
        yield Segment(text=cut(why, _CAUSE_WIDTH, mark=signs.mark), weight=4, least=_LEAST_CAUSE)
    if progress.validations:
        yield Segment(text=f"{numbered(progress.validations, 'validation')} left", weight=1)
    if progress.restarts:
        failed = progress.failed
        last = "" if failed is None else f", last: {printable(str(failed.failure))}"
        text = f"{numbered(progress.restarts, 'restart')}{last}"
        text = cut(text, _CAUSE_WIDTH, mark=signs.mark)
        yield Segment(text=text, weight=3, least=_LEAST_CAUSE)
    elapsed_s = int(progress.ledger.elapsed_s(now))
    yield Segment(text=f"{_clock(elapsed_s)} elapsed", weight=6)
    if progress.ledger.seconds["train"]:
        yield Segment(text=f"goodput {progress.ledger.goodput:.0%}", weight=2)


def _clock(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _waits(progress: Progress, now: float) -> str:
    match progress.stage:
        case Stage.TRAINING:
            text = "training, no report yet"
        case Stage.JOINING:
            text = f"{progress.joined} of {progress.world_size} ranks have joined"
        case stage:
            text = str(stage)
    return f"{text} ({duration(max(0.0, now - progress.since))})"


def _rate(steps_per_s: float | None) -> str:
    if steps_per_s is None:
        return ""
    if steps_per_s >= 1:
        return f"{steps_per_s:.3g} steps/s" if steps_per_s < 1000 else f"{steps_per_s:.0f} steps/s"
    return f"{duration(1 / steps_per_s)}/step"


def _busy(shares: Any, signs: Signs) -> str:
    if not shares:
        return ""
    if signs.bars and len(shares) <= _BAR_RANKS:
        top = len(signs.bars) - 1
        return "".join(signs.bars[round(share * top)] for share in shares)
    if len(shares) <= _FEW_RANKS:
        return "busy " + " ".join(f"{share:.0%}" for share in shares)
    least, most = min(shares), max(shares)
    return f"busy {least:.0%} (rank {shares.index(least)}) to {most:.0%}"


def _name(run: RunInfo, width: int) -> str:
    name = printable(run.name)
    return name if columns(name) <= max(8, width // 4) else cut(name, max(8, width // 4))
