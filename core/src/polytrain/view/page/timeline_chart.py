"""The geometry of a timeline: what is drawn where, in percent of its width. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polytrain.view.page.facts import AttemptFacts, Facts
from polytrain.view.page.verdict import duration
from polytrain.view.timeline import Mark, MarkKind, Span

MOST_SPANS = 800
"""Spans that are drawn; more than that are finer than a screen."""

MOST_MARKS = 400

MOST_RANKS = 32
"""Ranks with a row each: those with marks first."""

_TICKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A coloured stretch."""

    account: str
    x: float
    width: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A mark."""

    kind: MarkKind
    x: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is drawn of one rank."""

    rank: int
    attempts: tuple[int, ...]
    """The attempts that had it."""

    signs: tuple[Sign, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The whole timeline."""

    bars: tuple[Bar, ...]
    bars_by_attempt: tuple[tuple[Bar, ...], ...]
    signs: tuple[Sign, ...]
    rows: tuple[Row, ...]
    ranks: int
    """How many ranks there were."""

    marks: int
    """How many marks there were."""

    is_coarse: bool
    """Whether spans were merged."""

    ticks: tuple[tuple[float, str], ...]


def chart_of(facts: Facts) -> Chart:
    """Lay a run's timeline out."""
    spans = coarse(facts.spans, facts.wall_s)
    marks = drawn_marks(facts.marks, facts.wall_s)
    return Chart(
        bars=tuple(_bars(spans, 0.0, facts.wall_s, facts.wall_s)),
        bars_by_attempt=tuple(
            tuple(_bars(spans, each.start, each.stop, facts.wall_s)) for each in facts.attempts
        ),
        signs=tuple(_sign(mark, facts.wall_s) for mark in marks),
        rows=tuple(_row(rank, facts.attempts, marks, facts.wall_s) for rank in shown_ranks(facts)),
        ranks=len(facts.ranks),
        marks=len(facts.marks),
        is_coarse=len(spans) < len(facts.spans),
        ticks=tuple(
            (100 * tick / _TICKS, duration(facts.wall_s * tick / _TICKS))
            for tick in range(_TICKS + 1)
        ),
    )


def coarse(spans: Sequence[Span], wall_s: float) -> Sequence[Span]:
    """Return spans of which a screen can show each: in each slot of time, the longest account.

    Args:
        spans: without gaps.
        wall_s: the length of all together.
    """
    most = MOST_SPANS
    if len(spans) <= most or wall_s <= 0:
        return spans
    slots: list[dict[str, float]] = [{} for _ in range(most)]
    times = [0.0] * most
    width = wall_s / most
    for span in spans:
        first = min(most - 1, int(span.start / width))
        last = min(most - 1, int((span.start + span.seconds) / width))
        for at in range(first, last + 1):
            begin = max(span.start, at * width)
            end = min(span.start + span.seconds, (at + 1) * width)
            if not slots[at]:
                times[at] = span.time + begin - span.start
            slots[at][span.account] = slots[at].get(span.account, 0.0) + max(0.0, end - begin)
    merged: list[Span] = []
    for at, slot in enumerate(slots):
        account = max(slot, key=slot.__getitem__) if slot else merged[-1].account
        if merged and merged[-1].account == account:
            before = merged.pop()
            start, time = before.start, before.time
        else:
            start, time = at * width, times[at]
        merged.append(
            Span(account=account, start=start, seconds=(at + 1) * width - start, time=time)
        )
    return merged


def drawn_marks(marks: Sequence[Mark], wall_s: float) -> Sequence[Mark]:
    """Return marks of which a screen can show each: of those of a kind at one place, the last."""
    if len(marks) <= MOST_MARKS:
        return marks
    slots = {}
    for mark in marks:
        slots[mark.kind, mark.rank, int(mark.at / wall_s * MOST_MARKS)] = mark
    return sorted(slots.values(), key=lambda mark: mark.at)


def shown_ranks(facts: Facts) -> Sequence[int]:
    """Return the ranks that have a row."""
    ranks = [each.rank for each in facts.ranks]
    if len(ranks) <= MOST_RANKS:
        return ranks
    marked = [mark.rank for mark in facts.marks if mark.rank is not None]
    return sorted(list(dict.fromkeys([*marked, *ranks]))[:MOST_RANKS])


def _row(rank: int, attempts: Sequence[AttemptFacts], marks: Sequence[Mark], wall_s: float) -> Row:
    return Row(
        rank=rank,
        attempts=tuple(at for at, each in enumerate(attempts) if rank < each.workers),
        signs=tuple(_sign(mark, wall_s) for mark in marks if mark.rank == rank),
    )


def _bars(spans: Sequence[Span], start: float, stop: float, wall_s: float) -> Iterator[Bar]:
    for span in spans:
        begin, end = max(start, span.start), min(stop, span.start + span.seconds)
        if end > begin:
            yield Bar(
                account=span.account,
                x=_percent(begin, wall_s),
                width=round(_percent(end, wall_s) - _percent(begin, wall_s), 3),
                title=f"{span.account}: {duration(span.seconds)}",
            )


def _sign(mark: Mark, wall_s: float) -> Sign:
    text = mark.text if mark.rank is None else f"rank {mark.rank}: {mark.text}"
    title = f"{mark.kind} at {duration(mark.at)}: {text}"
    return Sign(kind=mark.kind, x=_percent(mark.at, wall_s), title=title)


def _percent(seconds: float, wall_s: float) -> float:
    return round(100 * seconds / wall_s, 3) if wall_s else 0.0
