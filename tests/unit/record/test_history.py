"""What a journal tells of a run: the same whatever drivers it had, and however they ended."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polytrain.errors import RunFormatError
from polytrain.events.attempt import Reported
from polytrain.record.entries import DivergenceFound, Launched, Opened, RunConcluded
from polytrain.record.history import JOURNAL, RunHistory, read_history
from polytrain.record.journal import Journal
from polytrain.run.resume import previous_run
from polytrain.storage.location import Location


class Driver(Journal):
    """A driver's journal. A driver that is killed doesn't close it: the end of its test does."""

    is_closed = False

    def __exit__(self, *error: object) -> None:
        if not self.is_closed:
            self.is_closed = True
            super().__exit__(*error)


class Written:
    """A journal that drivers write, one after another or at the same time."""

    def __init__(self, path: Path) -> None:
        self.file = path / JOURNAL
        self._storage = Location.of(path).open()
        self._leases = 0
        self._drivers = ExitStack()

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: object) -> None:
        self._drivers.close()

    def driver(self, *, anew: bool = False, world_size: int = 2, **identity: Any) -> Journal:
        """A driver that has just opened the journal."""
        self._leases += 1
        journal = Driver(self._storage, token=self._leases)
        self._drivers.push(journal)
        journal.write(Opened(anew=anew, identity=identity, world_size=world_size))
        return journal

    def read(self) -> RunHistory:
        """What the journal tells."""
        run_history = read_history(self._storage.read_log(JOURNAL))
        assert run_history is not None
        return run_history


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    with Written(tmp_path) as journal:
        yield journal


def report(journal: Journal, *steps: int, **metrics: Any) -> None:
    for step in steps:
        journal.report(Reported(attempt=0, rank=0, step=step, metrics={"step": step, **metrics}))


def steps(run_history: RunHistory) -> list[int]:
    found = run_history.reports.steps().tolist()
    assert found == [metrics["step"] for metrics in run_history.reports]
    return found


def by(run_history: RunHistory) -> list[str]:
    """Who has reported what stands in the history."""
    return [metrics["by"] for metrics in run_history.reports]


@pytest.mark.parametrize(
    "journal",
    ["", "\n\n", "no JSON\n", '{"event": "Opened"}\n', "[1]\n3\nnull\n", '{"time": 1, "token": 1'],
)
def test_what_no_driver_has_opened_is_no_run(journal: str) -> None:
    assert read_history([journal.encode()]) is None


def test_a_run_that_went_well(written: Written) -> None:
    journal = written.driver(anew=True, world_size=3, backend="reference")
    journal.write(Launched(attempt=0, step=0, start=None, world_size=2))
    report(journal, 1, 2, 3)
    assert written.read().succeeded is None
    journal.write(RunConcluded(stopped=None, succeeded=True, reason="every rank finished"))
    found = written.read()
    assert found.identity["backend"] == "reference"
    assert (found.world_size, found.since_token, found.ledger.launches) == (3, 1, 1)
    assert steps(found) == [1, 2, 3]
    assert found.metrics == {"step": 3}
    assert (found.succeeded, found.reason) == (True, "every rank finished")


def test_metrics_are_as_they_were_reported(written: Written) -> None:
    metrics: Mapping[str, Any] = {"valid": {"auc": 0.1}, "text": "a\nb\x0b\x1e\u2028é", "l": [1]}
    report(written.driver(anew=True), 1, **metrics)
    assert written.read().metrics == {"step": 1, **metrics}


def test_a_restart_undoes_what_came_after_its_checkpoint(written: Written) -> None:
    journal = written.driver(anew=True)
    journal.write(Launched(attempt=0, step=0, start=None, world_size=2))
    report(journal, 1, 2, 3, by="first")
    journal.write(Launched(attempt=1, step=2, start="/run/checkpoint", world_size=2))
    assert steps(written.read()) == [1, 2]
    report(journal, 3, 4, by="second")
    assert steps(written.read()) == [1, 2, 3, 4]
    assert by(written.read()) == ["first", "first", "second", "second"]
    assert written.read().ledger.launches == 2


def test_another_driver_goes_on_where_the_first_was_killed(written: Written) -> None:
    first = written.driver(anew=True, world_size=2, backend="reference")
    first.write(Launched(attempt=0, step=0, start=None, world_size=2))
    report(first, 1, 2, 3, by="first")
    second = written.driver(world_size=4, backend="reference")
    second.write(Launched(attempt=0, step=1, start="/run/checkpoint", world_size=2))
    report(second, 2, 3, by="second")
    found = written.read()
    assert steps(found) == [1, 2, 3]
    assert by(found) == ["first", "second", "second"]
    assert (found.world_size, found.since_token, found.ledger.launches) == (4, 1, 2)


def replaced(written: Written, find: str, by: str) -> None:
    """Replace the first line that has this text."""
    lines = written.file.read_text().splitlines()
    at = next(at for at, line in enumerate(lines) if find in line)
    lines[at] = by
    written.file.write_text("\n".join(lines) + "\n")


def test_a_report_that_cannot_be_read_is_missed(written: Written) -> None:
    with written.driver(anew=True) as journal:
        journal.write(Launched(attempt=0, step=0, start=None, world_size=2))
        report(journal, 1, 2, 3)
        journal.write(RunConcluded(stopped=None, succeeded=True, reason="every rank finished"))
    assert not written.read().damage
    replaced(written, '"n": 1', "\0\0\0")
    found = written.read()
    assert steps(found) == [1, 3]
    assert str(found.damage) == (
        "journal.jsonl is damaged: line 4 can't be read; 1 report of rank 0 after step 1 is missing"
    )


def test_reports_that_are_missing_are_missed_by_their_numbers(written: Written) -> None:
    driver = written.driver(anew=True)
    report(driver, 1)
    driver.sync()
    report(driver, *range(2, 22))
    driver.sync()
    report(driver, 22)
    driver.sync()
    written.file.write_text(
        "".join(line for line in written.file.open() if '"Reports"' not in line)
    )
    found = written.read()
    assert steps(found) == [1, 22]
    assert "20 reports of rank 0 after step 1 are missing" in str(found.damage)


def test_reports_that_are_made_once_more_are_not_missing(written: Written) -> None:
    driver = written.driver(anew=True)
    report(driver, 1, 2, 3)
    driver.sync()
    written.file.write_text("".join(line for line in written.file.open() if '"n": 1' not in line))
    assert written.read().damage
    driver.write(Launched(attempt=1, step=1, start="/run/checkpoint", world_size=2))
    report(driver, 2, 3)
    assert steps(written.read()) == [1, 2, 3]
    assert not written.read().damage


def test_a_driver_that_died_leaves_an_incomplete_line(written: Written) -> None:
    first = written.driver(anew=True)
    first.write(Launched(attempt=0, step=0, start=None, world_size=2))
    report(first, 1)
    with written.file.open("a") as file:
        file.write('{"time": 1.0, "tok')
    assert not written.read().damage
    drafts = written.file.with_name(f"{JOURNAL}.drafts-000001")
    drafts.write_text(drafts.read_text() + '{"time": 2.0')
    second = written.driver()
    second.write(Launched(attempt=0, step=1, start="/run/checkpoint", world_size=2))
    report(second, 2)
    found = written.read()
    assert (steps(found), found.ledger.launches) == ([1, 2], 2)
    assert not found.damage


def test_a_driver_whose_first_line_is_lost_is_heard(written: Written) -> None:
    report(written.driver(anew=True), 1, 2)
    second = written.driver()
    second.write(Launched(attempt=0, step=2, start="/run/checkpoint", world_size=2))
    report(second, 3, 4)
    second.sync()
    replaced(written, '"token": 2, "event": "Opened"', "no JSON")
    found = written.read()
    assert steps(found) == [1, 2, 3, 4]
    assert "line 4 can't be read" in str(found.damage)


def test_a_run_whose_first_line_is_lost_keeps_its_checkpoints(written: Written) -> None:
    written.driver(anew=True)
    written.driver()
    replaced(written, '"Opened"', "no JSON")
    assert (written.read().since_token, written.read().damage.first_line) == (0, 1)


def test_what_is_lost_of_an_earlier_run_does_not_matter(written: Written) -> None:
    with written.driver(anew=True) as first:
        first.write(Launched(attempt=0, step=0, start=None, world_size=2))
        first.write(RunConcluded(stopped=None, succeeded=True, reason="every rank finished"))
    replaced(written, '"Launched"', "no JSON")
    assert written.read().damage
    report(written.driver(anew=True), 1)
    assert not written.read().damage


def test_a_failed_run_that_is_gone_on_with_has_not_failed_yet(written: Written) -> None:
    written.driver(anew=True).write(
        RunConcluded(succeeded=False, stopped=None, reason="no restart is left")
    )
    assert written.read().succeeded is False
    written.driver()
    assert (written.read().succeeded, written.read().reason) == (None, "")


def test_a_run_that_is_started_over_has_no_past(written: Written) -> None:
    first = written.driver(anew=True)
    first.write(Launched(attempt=0, step=0, start=None, world_size=2))
    report(first, 1, 2)
    first.write(RunConcluded(stopped=None, succeeded=True, reason="every rank finished"))
    written.driver(anew=True, backend="another")
    found = written.read()
    assert (found.reports, found.ledger.launches, found.succeeded) == ((), 0, None)
    assert (found.since_token, found.identity["backend"]) == (2, "another")
    assert found.metrics == {}


def test_a_driver_whose_run_was_taken_says_nothing_more(written: Written) -> None:
    """It was thought dead, and doesn't know yet."""
    first = written.driver(anew=True)
    first.write(Launched(attempt=0, step=0, start=None, world_size=2))
    report(first, 1, 2, by="first")
    second = written.driver()
    report(first, 3, by="first")
    second.write(Launched(attempt=0, step=2, start="/run/checkpoint", world_size=2))
    report(second, 3, by="second")
    first.write(Launched(attempt=1, step=0, start=None, world_size=2))
    report(first, 1, 4, by="first")
    first.write(RunConcluded(stopped=None, succeeded=False, reason="the storage has failed"))
    report(second, 4, by="second")
    found = written.read()
    assert steps(found) == [1, 2, 3, 4]
    assert by(found) == ["first", "first", "second", "second"]
    assert (found.ledger.launches, found.succeeded) == (2, None)


@pytest.mark.parametrize("torn", ["in a line", "between lines", "with zeros"])
def test_torn_lines_are_passed_over(written: Written, torn: str) -> None:
    first = written.driver(anew=True)
    report(first, 1, 2)
    first.sync()
    content = written.file.read_bytes()
    match torn:
        case "in a line":
            written.file.write_bytes(content[:-10])
        case "between lines":
            written.file.write_bytes(content[:-1])
        case "with zeros":
            # What some file systems leave of a write that power failed on.
            written.file.write_bytes(content[:-10] + bytes(200))
    second = written.driver()
    report(second, 3)
    assert steps(written.read()) == ([1, 2, 3] if torn == "between lines" else [1, 3])


@pytest.mark.parametrize(
    "line",
    [
        '{"time": 1.0, "token": 1, "event": "Opened", "anew": true, "identity": {}}',
        '{"time": 1.0, "token": 1, "event": "Opened", "anew": true, "identity": {}, "format": 99}',
    ],
    ids=["format 1", "a later one"],
)
def test_a_journal_of_another_format_is_refused(line: str) -> None:
    with pytest.raises(RunFormatError, match=r"format (1|99); .* reads format 6\. .*RunConfig"):
        read_history([line.encode()])


def test_a_long_history_takes_little_room(written: Written) -> None:
    """8 bytes for each number, and a part of the file at a time."""
    count = 100_000
    driver = written.driver(anew=True)
    report(driver, *range(count), loss=0.5)
    driver.sync()
    assert written.file.stat().st_size < 50 * count
    written.read()
    tracemalloc.start()
    found = written.read()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.reports) == count
    assert kept < 2 * 8 * count * 1.25
    assert peak - kept < 20e6


@pytest.mark.parametrize("count", [1, 15, 16, 4095, 4096, 4097, 9000])
def test_a_driver_that_is_killed_loses_no_report(written: Written, count: int) -> None:
    """Neither what is in the journal for good, nor what isn't yet."""
    report(written.driver(anew=True), *range(1, count + 1))
    assert steps(written.read()) == list(range(1, count + 1))
    second = written.driver()
    report(second, count + 1)
    assert steps(written.read()) == list(range(1, count + 2))


def test_a_driver_that_dies_between_drafts_and_lines_reports_nothing_twice(
    written: Written,
) -> None:
    report(driver := written.driver(anew=True), *range(1, 41))
    [drafts] = written.file.parent.glob("*.drafts-*")
    kept = drafts.read_bytes()
    driver.sync()
    report(driver, 41, 42)
    drafts.write_bytes(kept + drafts.read_bytes())
    assert steps(written.read()) == list(range(1, 43))
    written.driver()
    assert steps(written.read()) == list(range(1, 43))


def test_a_driver_that_dies_while_it_writes_many_reports_loses_none(written: Written) -> None:
    report(driver := written.driver(anew=True), *range(1, 41))
    [drafts] = written.file.parent.glob("*.drafts-*")
    kept, before = drafts.read_bytes(), written.file.stat().st_size
    driver.sync()
    drafts.write_bytes(kept)
    whole = written.file.read_bytes()
    for end in range(before, len(whole), 101):
        written.file.write_bytes(whole[:end])
        assert steps(written.read()) == list(range(1, 41))
    written.driver()
    assert steps(written.read()) == list(range(1, 41))


@pytest.mark.parametrize(
    "damage",
    [
        {"times": "AAAA"},
        {"times": "no base64"},
        {"times": ""},
        {"columns": [{"name": "step"}]},
        {"columns": [{"name": "step", "kind": "json", "runs": [[19, 0]], "values": [1, 2]}]},
        {"steps": 3},
        {"count": 10**12},
    ],
    ids=str,
)
def test_damaged_reports_are_reported_and_spoil_no_others(
    written: Written, damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    driver = written.driver(anew=True)
    report(driver, *range(1, 21))
    driver.sync()
    opened, line = written.file.read_text().splitlines()
    damaged = json.dumps({**json.loads(line), **damage})
    written.file.write_text(f"{opened}\n{damaged}\n")
    report(driver, 21)
    found = written.read()
    assert steps(found) == [21]
    assert str(found.damage) == (
        "journal.jsonl is damaged: 1 line can't be read; 20 reports of rank 0 after step 0 are "
        "missing"
    )
    assert "damaged in the journal" in caplog.text


NUMBERS = {"loss": math.nan, "inf": math.inf, "low": -math.inf, "deep": {"of": [1.0, math.nan]}}


@pytest.mark.parametrize("count", [1, 20])
def test_every_reader_of_json_takes_a_journal(written: Written, count: int) -> None:
    """RFC 8259 has neither NaN nor infinities."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    driver = written.driver(anew=True, missing=math.nan)
    report(driver, *range(count), **NUMBERS)
    driver.sync()
    for line in written.file.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    found = written.read()
    assert math.isnan(found.identity["missing"])
    assert [repr(metrics) for metrics in found.reports] == [
        repr({"step": step, **NUMBERS}) for step in range(count)
    ]


def test_a_journal_is_read_again_only_if_somebody_has_written_to_it(written: Written) -> None:
    driver = written.driver(anew=True)
    report(driver, 1)
    storage = Location.of(written.file.parent).open()
    first = previous_run(storage)
    assert previous_run(storage, known=first) is first
    report(driver, 2)
    second = previous_run(storage, known=first)
    assert second.history is not None
    assert steps(second.history) == [1, 2]


def report_of_rank(journal: Journal, rank: int, *steps: int) -> None:
    for step in steps:
        journal.report(Reported(attempt=0, rank=rank, step=step, metrics={"at": 10 * step + rank}))


def of_ranks(run_history: RunHistory) -> dict[int, list[int]]:
    return {
        rank: [metrics["at"] for metrics in kept]
        for rank, kept in run_history.of_other_ranks.items()
    }


@pytest.mark.parametrize("count", [3, 5000])
def test_reports_of_all_ranks_are_kept_and_undone_by_a_restart(
    written: Written, count: int
) -> None:
    first = written.driver()
    for step in range(1, count + 1):
        report(first, step)
        report_of_rank(first, 1, step)
    report_of_rank(first, 2, 1)
    # What is written as drafts alone is read too.
    assert of_ranks(written.read()) == {1: [10 * s + 1 for s in range(1, count + 1)], 2: [12]}
    first.sync()
    second = written.driver()
    second.write(Launched(attempt=0, step=2, start=None, world_size=2))
    report_of_rank(second, 1, 3)
    second.sync()
    assert of_ranks(written.read()) == {1: [11, 21, 31], 2: [12]}
    assert steps(written.read()) == [1, 2]


def test_what_a_driver_resumes_has_the_reports_of_all_ranks(written: Written) -> None:
    first = written.driver()
    report_of_rank(first, 1, *range(1, 40))
    first.sync()
    known = written.read()
    with Journal(Location.of(written.file.parent).open(), token=9, history=known) as again:
        again.write(Launched(attempt=0, step=5, start=None, world_size=2))
        assert len(again.history.of_other_ranks[1]) == 5


@pytest.mark.parametrize("start", [0, 100])
def test_the_last_driver_that_began_where_the_run_does_has_divided_the_data(start: int) -> None:
    """The first died before its first checkpoint; the third went on, with fewer workers."""
    history = RunHistory()

    def began(token: int, most: int, *steps: int) -> None:
        history.take(Opened(token=token, anew=False, identity={}, world_size=most))
        for attempt, step in enumerate(steps):
            launched = Launched(attempt=attempt, step=step, start=None, world_size=2)
            history.take(replace(launched, token=token))

    began(1, 2, start)
    # The third goes back to the start after a divergence, and keeps the division.
    for token, most, steps in ((2, 8, (start,)), (3, 4, (start + 6, start))):
        began(token, most, *steps)
    assert (history.world_size, history.divided_for) == (4, 8)
    found: Any = {"rank": 0, "step": start + 1, "good_step": start, "reason": "loss is nan"}
    skipped = {"train": ((0, 0, 8),)}
    history.take(DivergenceFound(token=3, attempt=1, skipped=skipped, **found))
    began(4, 16, start)
    assert (history.world_size, history.divided_for) == (16, 8)
