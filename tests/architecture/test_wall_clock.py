"""Who reads the wall clock: it may be set at any time, so nothing may be measured by it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

READERS = {
    "linux/clock.py": "what a driver's own time begins with, and how far the two differ",
    "api/checks.py": "a date in the name of a run",
    "run/lease.py": "how long ago a driver on another machine gave a sign of life",
    "view/cli/following.py": "a run that no lease is known of",
    "view/page/reading.py": "the date on a page",
    "trackers/tensorboard.py": "dates in headers of event files, which TensorBoard wants",
    "view/doctor/nodes.py": "how far the nodes' clocks differ is the question",
    "view/doctor/stored.py": "how far the storage's clock differs is the question",
}
"""Module → what it reads the wall clock for."""

_OF_TIME = {"time", "time_ns", "localtime", "gmtime", "strftime", "ctime", "asctime"}
_OF_DATES = {"now", "utcnow", "today"}


def _readings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in _OF_TIME:
                yield f"time.{name}, line {node.lineno}"
            case ast.Attribute(
                value=ast.Name(id="datetime" | "date") | ast.Attribute(attr="datetime" | "date"),
                attr=name,
            ) if name in _OF_DATES:
                yield f"datetime.{name}, line {node.lineno}"
            case ast.ImportFrom(module="time", names=names):
                yield from (f"from time import {each.name}" for each in names)
            case ast.Attribute(attr="CLOCK_REALTIME"):
                yield f"CLOCK_REALTIME, line {node.lineno}"


def test_only_those_who_mean_the_wall_clock_read_it() -> None:
    sources = [path for src in ROOT.glob("*/src") for path in src.rglob("*.py")]
    assert len(sources) > 400
    found = {
        str(path.relative_to(ROOT)).removeprefix("core/src/polytrain/"): list(
            _readings(path.read_text())
        )
        for path in sources
    }
    readers = {name: lines for name, lines in found.items() if lines}
    assert readers.keys() - READERS.keys() == set(), (
        f"{readers}: use polytrain.linux.clock.Clock for what is recorded, time.monotonic() for "
        "what is measured"
    )
    assert READERS.keys() - readers.keys() == set(), "they don't read it any more"


def test_the_search_finds_every_way_to_read_it() -> None:
    ways = (
        "import time; time.time()",
        "import time; clock = time.time",
        "from time import time",
        "import datetime; datetime.datetime.now()",
        "from datetime import datetime, UTC; datetime.now(UTC)",
        "import time; time.clock_gettime(time.CLOCK_REALTIME)",
    )
    assert [way for way in ways if not list(_readings(way))] == []
