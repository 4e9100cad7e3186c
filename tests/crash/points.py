"""Which of the points that a run comes by are tried."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from tests.crash.tracing import Line, Point, writes_to_a_file

Item = TypeVar("Item")


def chosen_points(lines: Sequence[Line], *, visits: int, random: Random) -> list[Point]:
    """Some visits to every line that was visited; a line that writes to a file can tear it, too.

    Args:
        lines: as they were visited.
        visits: of each line, at most: the first, the last, and any in between.
        random: chooses those.
    """
    points = []
    for line, count in Counter(lines).items():
        for visit in _chosen_visits(count, visits, random):
            point = Point(line=line, visit=visit)
            points.append(point)
            if writes_to_a_file(line):
                points.append(replace(point, tears=True))
    return points


def _chosen_visits(count: int, wanted: int, random: Random) -> list[int]:
    if wanted >= count:
        return list(range(1, count + 1))
    if wanted == 1:
        return [random.randint(1, count)]
    return sorted([1, count, *random.sample(range(2, count), wanted - 2)])


def spread(
    items: Sequence[Item], count: int, key: Callable[[Item], Hashable], *, random: Random
) -> list[Item]:
    """As many items, as evenly as can be from all kinds of them."""
    shuffled = random.sample(items, len(items))
    kinds: defaultdict[Hashable, list[Item]] = defaultdict(list)
    for item in shuffled:
        kinds[key(item)].append(item)
    found: list[Item] = []
    while len(found) < min(count, len(items)):
        for kind in [kind for kind in kinds.values() if kind]:
            found.append(kind.pop())
    return found[:count]
