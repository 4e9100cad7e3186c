"""What the driver does for each event doesn't grow with the number of workers.

Counted on simulated hosts, so that the machine's load doesn't matter: lines of code that the
driver's thread runs, messages to hosts, and bytes that stay.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.benchmarks.simulated_hosts import PER_HOST, SimulatedHosts, whole_story

_FEW, _MANY = 32, 128

_AT_MOST = 1.1 * _MANY / _FEW
"""As many times as much may it be with many workers as with few: what grows with the square of
their number is 16 times as much."""


@dataclass
class Counted:
    """One run."""

    lines: Counter[str]
    """Part of the story → lines of polytrain's code that ran in the driver's thread."""

    hosts: SimulatedHosts
    journal: int
    """Bytes."""


def counted(workers: int, storage: Path, **options: Any) -> Counted:
    """Train on simulated hosts, and count."""
    hosts = SimulatedHosts(workers, whole_story)
    lines: Counter[str] = Counter()
    part = ""

    def begin(name: str) -> None:
        nonlocal part
        part = name

    def in_polytrain(frame: FrameType, event: str, argument: Any) -> Any:
        return count if "/polytrain/" in frame.f_code.co_filename else None

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        lines[part] += 1
        return count

    hosts.on_part = begin
    before = sys.gettrace()
    sys.settrace(in_polytrain)
    try:
        hosts.fit(storage, **options)
    finally:
        sys.settrace(before)
    return Counted(lines, hosts, (storage / "run" / "journal.jsonl").stat().st_size)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Counted, Counted]:
    """A run of few workers, and one of many."""
    few, many = (
        counted(workers, tmp_path_factory.mktemp("run"), keep_reports="every_rank")
        for workers in (_FEW, _MANY)
    )
    return few, many


def test_work_of_the_driver_grows_with_the_number_of_workers(
    runs: tuple[Counted, Counted],
) -> None:
    few, many = runs
    grown = {part: many.lines[part] / few.lines[part] for part in few.lines if part}
    assert grown.keys() >= {"start", "report", "checkpoint", "tick", "worker lost", "drain", "end"}
    assert {part: times for part, times in grown.items() if times > _AT_MOST} == {}


def test_the_journal_grows_with_the_number_of_workers(runs: tuple[Counted, Counted]) -> None:
    few, many = runs
    assert many.journal / few.journal <= _AT_MOST


def test_a_host_gets_one_message_for_all_its_workers(runs: tuple[Counted, Counted]) -> None:
    _, many = runs
    for kind, calls in many.hosts.calls.items():
        assert many.hosts.messages[kind] <= calls / PER_HOST + 2, kind
