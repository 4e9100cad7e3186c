"""How much a journal grows by how busy the ranks are, and what is read from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.record.test_clock import Machine

from polytrain.record.entries import (
    Entry,
    Launched,
    LoadMeasured,
    Opened,
    RunConcluded,
    encoded,
)
from polytrain.record.history import JOURNAL, entries, read_as
from polytrain.record.journal import Journal, News
from polytrain.storage.location import Location
from polytrain.view.present import RunRecord

HOURS, WINDOW_S = 6, 30
WINDOWS = HOURS * 3600 // WINDOW_S


@pytest.mark.parametrize(
    ("ranks", "gpus", "most"),
    [(2, 0, 400_000), (1000, 0, 300_000), (2, 8, 400_000), (100, 8, 350_000)],
)
def test_a_journal_grows_by_a_megabyte_a_day_however_many_ranks(
    ranks: int, gpus: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    storage = Location.of(tmp_path).open()
    followed: list[Entry] = []
    news = News()
    news.subscribe(followed.append)
    with Journal(storage, token=1, news=news) as journal:
        journal.write(Opened(anew=True, identity={}, world_size=ranks))
        journal.write(Launched(attempt=0, step=0, start=None, world_size=ranks))
        before = sum(map(len, storage.read_log(JOURNAL)))
        for window in range(WINDOWS):
            machine.runs(WINDOW_S)
            busy = [0.25 if window < WINDOWS // 2 else 0.75] * ranks
            cpu = [4 * share for share in busy]
            memory = [2_000_000_000 + (window if window < WINDOWS - 1 else 0)] * ranks
            share = busy[0]
            in_use = 80_000_000_000 + window
            journal.write(
                LoadMeasured(
                    attempt=0,
                    window=window,
                    busy=busy,
                    cpu=cpu,
                    memory=memory,
                    gpus=[[(share, in_use)] * gpus] * ranks if gpus else (),
                )
            )
            assert isinstance(followed[-1], LoadMeasured), "the display has each window at once"
        journal.write(RunConcluded(stopped=None, succeeded=True, reason=""))
    history = read_as(RunRecord, storage.read_log(JOURNAL))
    assert history is not None
    loads = [e for e in entries(storage.read_log(JOURNAL)) if isinstance(e, LoadMeasured)]
    assert sum(map(len, storage.read_log(JOURNAL))) - before < most
    assert sum(load.windows for load in loads) == WINDOWS
    for rank in history.ranks.overviews():
        assert rank.busy == pytest.approx(0.5, abs=0.01)
        assert rank.cpu == pytest.approx(2, abs=0.01)
        if gpus:
            assert rank.gpu == pytest.approx(0.5, abs=0.01)
            assert rank.gpu_memory == gpus * (80_000_000_000 + WINDOWS - 1)
        else:
            assert (rank.gpu, rank.gpu_memory) == (None, None)
        assert rank.memory == 2_000_000_000 + WINDOWS - 2


def test_an_attempt_that_ends_early_has_its_first_and_last_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    storage = Location.of(tmp_path).open()
    with Journal(storage, token=1) as journal:
        journal.write(Opened(anew=True, identity={}, world_size=1000))
        journal.write(LoadMeasured(attempt=0, window=0, busy=[0.5] * 1000, memory=[1] * 1000))
        for window in (1, 2):
            machine.runs(1)
            journal.write(
                LoadMeasured(attempt=0, window=window, busy=[window / 4] * 1000, memory=[2] * 1000)
            )
        journal.write(RunConcluded(stopped=None, succeeded=True, reason=""))
    loads = [each for each in entries(storage.read_log(JOURNAL)) if isinstance(each, LoadMeasured)]
    found = [(each.window, each.windows, each.busy[0]) for each in loads]
    assert found == [(0, 1, 0.5), (2, 2, 0.38)]


def test_gpus_that_are_unknown_in_some_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    storage = Location.of(tmp_path).open()
    known: list[list[tuple[float | None, int | None]]] = [[(0.25, 5), (None, 7)], []]
    with Journal(storage, token=1) as journal:
        journal.write(Opened(anew=True, identity={}, world_size=2))
        for window, gpus in enumerate(((), (), known, [[(0.75, 4), (None, None)], []], ())):
            machine.runs(1)
            journal.write(
                LoadMeasured(attempt=0, window=window, busy=[0.5] * 2, memory=[1] * 2, gpus=gpus)
            )
        journal.write(RunConcluded(stopped=None, succeeded=True, reason=""))
    first, rest = (
        each for each in entries(storage.read_log(JOURNAL)) if isinstance(each, LoadMeasured)
    )
    assert "gpus" not in encoded(first), "a run without GPUs has nothing of them"
    assert (rest.windows, rest.gpus) == (4, [[(0.5, 5), (None, 7)], []])
