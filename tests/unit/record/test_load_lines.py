"""How much a journal grows by how busy the ranks are, and what is read from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.record.test_clock import Machine

from polytrain.record.history import entries
from polytrain.record.journal import JOURNAL, Journal
from polytrain.record.ledger import Ledger
from polytrain.record.rank_overview import ranks_of
from polytrain.run.actions import Conclude
from polytrain.storage.location import Location

HOURS, WINDOW_S = 6, 30
WINDOWS = HOURS * 3600 // WINDOW_S


@pytest.mark.parametrize(("ranks", "most"), [(2, 400_000), (1000, 300_000)])
def test_a_journal_grows_by_a_megabyte_a_day_however_many_ranks(
    ranks: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    storage = Location.of(tmp_path).open()
    followed: list[Mapping[str, Any]] = []
    with Journal(storage, token=1, ledger=Ledger(), follow=followed.append) as journal:
        journal.opened(anew=True, identity={}, world_size=ranks)
        journal.launched(attempt=0, step=0, start=None, world_size=ranks)
        before = sum(map(len, storage.read_log(JOURNAL)))
        for window in range(WINDOWS):
            machine.runs(WINDOW_S)
            busy = [0.25 if window < WINDOWS // 2 else 0.75] * ranks
            memory = [2_000_000_000 + (window if window < WINDOWS - 1 else 0)] * ranks
            journal.load(attempt=0, window=window, busy=busy, memory=memory)
            assert followed[-1]["event"] == "Load", "the display has each window at once"
        journal.concluded(Conclude(succeeded=True, reason=""))
    lines = list(entries(storage.read_log(JOURNAL)))
    assert sum(map(len, storage.read_log(JOURNAL))) - before < most
    assert sum(line["windows"] for line in lines if line["event"] == "Load") == WINDOWS
    for rank in ranks_of(lines):
        assert rank.busy == pytest.approx(0.5, abs=0.01)
        assert rank.memory == 2_000_000_000 + WINDOWS - 2


def test_an_attempt_that_ends_early_has_its_first_and_last_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    storage = Location.of(tmp_path).open()
    with Journal(storage, token=1, ledger=Ledger()) as journal:
        journal.opened(anew=True, identity={}, world_size=1000)
        journal.load(attempt=0, window=0, busy=[0.5] * 1000, memory=[1] * 1000)
        for window in (1, 2):
            machine.runs(1)
            journal.load(attempt=0, window=window, busy=[window / 4] * 1000, memory=[2] * 1000)
        journal.concluded(Conclude(succeeded=True, reason=""))
    loads = [each for each in entries(storage.read_log(JOURNAL)) if each["event"] == "Load"]
    found = [(each["window"], each["windows"], each["busy"][0]) for each in loads]
    assert found == [(0, 1, 0.5), (2, 2, 0.38)]
