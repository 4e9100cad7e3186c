"""A driver's time: what a clock that is set, or a suspended machine, does to it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from polytrain.linux.clock import Clock
from polytrain.record.entries import ClockChanged, Closed, Opened, ProcessesRequested
from polytrain.record.history import JOURNAL, entries, read_history
from polytrain.record.journal import Journal
from polytrain.storage.location import Location


class Machine:
    """A machine's two clocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.monotonic = 1_000_000.0, 50.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)

    def runs(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_it_goes_on_as_it_began(machine: Machine) -> None:
    clock = Clock()
    machine.runs(5)
    assert (clock.began, clock.now(), clock.ahead_s()) == (1_000_000.0, 1_000_005.0, 0.0)
    machine.wall += 3600  # set, or suspended
    machine.runs(1)
    assert (clock.now(), clock.ahead_s()) == (1_000_006.0, 3600.0)


def test_a_journal_notes_each_change_once(machine: Machine, tmp_path: Path) -> None:
    storage = Location.of(tmp_path).open()
    for token in (1, 2):
        with Journal(storage, token=token) as journal:
            # Between `fit()` and the first line.
            machine.wall += 100
            journal.write(Opened(anew=token == 1, identity={}, world_size=1))
            for change in (0.0, 0.4, -30.0, 0.0):
                machine.wall += change
                machine.runs(1)
                journal.write(ProcessesRequested(attempt=0))
            journal.closed()
    found = [
        (entry.token, type(entry), entry.by_s if isinstance(entry, ClockChanged) else None)
        for entry in entries(storage.read_log(JOURNAL))
    ]
    of_one = [
        (Opened, None),
        (ClockChanged, 100.0),
        (ProcessesRequested, None),
        (ProcessesRequested, None),
        (ClockChanged, -29.6),
        (ProcessesRequested, None),
        (ProcessesRequested, None),
        (Closed, None),
    ]
    assert found == [(token, *line) for token in (1, 2) for line in of_one]
    history = read_history(storage.read_log(JOURNAL))
    assert history is not None
    assert history.ledger.wall_s == 8.0
