"""Trackers without a run: files of rows, hostile names, and what happens if a tracker fails."""

from __future__ import annotations

import csv
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from click.testing import CliRunner
from tests.unit.checkpoint.checkpoints import commit, directory_of, store_in
from tests.unit.record.journal_writer import JournalWriter

from polytrain import InvalidJobError, RunConfig, RunOwnedError, make_trainer
from polytrain.record.entries import RunConcluded
from polytrain.storage.location import Location
from polytrain.text.metrics import flat
from polytrain.trackers import CSV, MLflow, TensorBoard
from polytrain.trackers.delivery import TrackedFacts, send_missing
from polytrain.trackers.description import Description
from polytrain.trackers.state import TrackerState
from polytrain.trackers.tracker import Row, TrackedRun, Tracker
from polytrain.trackers.tracking import Tracking
from polytrain.view.cli.show import command as show
from polytrain.view.cli.sync import command

HOSTILE = {"a/b": 1.5, 'q"uote,': 2, "<script>": 0.25, "new\nline": 7, "cr\r": 8, "step": 9}
HOSTILE |= {"": 3.0, "ü": -1, "long": [0.5] * 50_000}
OF_CSV = {"step": "xstep", "time": "xtime"}
"""Metrics with the names of columns that each row has → their columns."""


def run_in(directory: Path, run_id: str = "") -> TrackedRun:
    return TrackedRun(
        name="run", address=str(directory), key="key", run_id=run_id, directory=directory
    )


def rows_of(*metrics: Mapping[str, Any]) -> list[Row]:
    return [Row(step=n, time=n / 8, metrics=each) for n, each in enumerate(metrics, 1)]


def read_back(directory: Path) -> list[Row]:
    """Read a file as a user would, not with our code."""
    with (directory / "metrics.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header[:2] == ["step", "time"]
    assert len(header) == len(set(header))
    return [
        Row(
            step=int(step),
            time=float(when),
            metrics={
                name: json.loads(cell) for name, cell in zip(header[2:], cells, strict=True) if cell
            },
        )
        for step, when, *cells in lines
    ]


def test_nested_metrics_are_flat() -> None:
    assert flat({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}


def test_any_name_and_a_new_metric_are_kept(tmp_path: Path) -> None:
    rows = rows_of({"loss": 0.5}, {"loss": 0.25, **HOSTILE}, {"text": 'a "b",\n', "ok": True})
    sink = CSV().open(run_in(tmp_path))
    for row in rows:
        sink.write([row])
    sink.close()
    assert read_back(tmp_path) == [
        replace(row, metrics={OF_CSV.get(name, name): row.metrics[name] for name in row.metrics})
        for row in rows
    ]


def test_a_metric_with_the_name_of_a_column_has_one_of_its_own(tmp_path: Path) -> None:
    sink = CSV().open(run_in(tmp_path))
    sink.write(rows_of({"step": 100, "loss": 0.5}))
    sink.amend(Row(step=1, time=9.0, metrics={"time": 2.5}))
    again = CSV().open(run_in(tmp_path, str(tmp_path / "metrics.csv")))
    again.write(rows_of({}, {"step": 200}, {"step": 300, "xstep": 4}))
    table = pd.read_csv(tmp_path / "metrics.csv")
    assert list(table) == ["step", "time", "xstep", "loss", "xtime", "xxstep"]
    assert table.iloc[-1][["step", "xstep", "xxstep"]].tolist() == [3, 4, 300]
    table = table[:2]
    assert table["step"].tolist() == [1, 2]
    assert table["xstep"].tolist() == [100, 200]
    assert table["xtime"][0] == 2.5


def test_a_table_of_numbers_is_read_by_pandas(tmp_path: Path) -> None:
    sink = CSV().open(run_in(tmp_path))
    sink.write(rows_of({"loss": 0.5, "n": 1}, {"loss": math.nan, "n": 2}, {"loss": math.inf}))
    table = pd.read_csv(tmp_path / "metrics.csv")
    assert table["loss"].tolist()[::2] == [0.5, math.inf]
    assert math.isnan(table["loss"][1])
    assert table["step"].tolist() == [1, 2, 3]


def test_an_incomplete_line_is_written_again(tmp_path: Path) -> None:
    rows = rows_of({"loss": 0.5}, {"loss": 0.25}, {"loss": 0.125})
    CSV().open(run_in(tmp_path)).write(rows)
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-4])
    sink = CSV().open(run_in(tmp_path, str(path)))
    assert sink.sent == 2
    sink.write(rows)
    assert read_back(tmp_path) == rows


def test_rows_are_removed_and_amended(tmp_path: Path) -> None:
    sink = CSV().open(run_in(tmp_path))
    sink.write(rows_of({"loss": 0.5}, {"loss": 0.25}, {"loss": 0.125}))
    sink.rewind(2)
    sink.amend(Row(step=1, time=9.0, metrics={"accuracy": 1.0}))
    assert read_back(tmp_path) == rows_of({"loss": 0.5, "accuracy": 1.0}, {"loss": 0.25})


def test_the_file_of_a_different_run_is_kept(tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("a,b\n1,2\n")
    with pytest.raises(FileExistsError, match="isn't of this run: give another path"):
        CSV(str(mine)).open(run_in(tmp_path))
    assert mine.read_text() == "a,b\n1,2\n"


@dataclass(frozen=True)
class Memory(Tracker):
    """Keeps rows in this process; `hook` may fail or wait."""

    name: ClassVar[str] = "memory"
    store: list[Row] = field(default_factory=list, compare=False)
    hook: Callable[[], None] = field(default=lambda: None, compare=False)
    ended: list[Mapping[str, Any]] = field(default_factory=list, compare=False)
    described: list[Description] = field(default_factory=list, compare=False)
    grown: threading.Condition = field(default_factory=threading.Condition, compare=False)

    def open(self, run: TrackedRun) -> _MemorySink:
        self.hook()
        return _MemorySink(self, run)

    def options(self) -> dict[str, Any]:
        return {}

    def has(self, count: int) -> bool:
        """Wait for so many rows."""
        with self.grown:
            return self.grown.wait_for(lambda: len(self.store) >= count, timeout=60)


@dataclass
class _MemorySink:
    tracker: Memory
    run: TrackedRun
    run_id: str = "1"
    sent: int | None = None

    def write(self, rows: Sequence[Row]) -> None:
        self.tracker.hook()
        with self.tracker.grown:
            self.tracker.store.extend(rows)
            self.tracker.grown.notify_all()

    def rewind(self, step: int) -> None:
        raise AssertionError("it can't")

    def amend(self, row: Row) -> None:
        with self.tracker.grown:
            self.tracker.store.append(row)
            self.tracker.grown.notify_all()

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        self.tracker.ended.append(summary)

    def describe(self, description: Description) -> None:
        self.tracker.described.append(description)

    def close(self) -> None:
        pass


def facts_of(directory: Path) -> TrackedFacts:
    return TrackedFacts(location=Location.of(directory), since=1)


EVENTS = ("report", "report", "commit", "report", "restart", "report", "report")


def write_run(directory: Path, tracking: Tracking, events: Sequence[str] = EVENTS) -> JournalWriter:
    with JournalWriter(directory, tracking.follow) as writer:
        for event in events:
            writer.do(event)
        writer.finish()
        return writer


def of(store: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [row.metrics for row in store]


def test_a_tracker_gets_what_the_run_was_started_with_and_its_end(tmp_path: Path) -> None:
    tracker = Memory()
    # Its last checkpoint was deleted, as one of what has diverged is.
    store = store_in(tmp_path)
    kept = [commit(store, number, model="m") for number in (0, 1)][-1]
    with Tracking([tracker], facts_of(tmp_path), own_token=1) as tracking:
        writer = write_run(tmp_path, tracking)
    assert of(tracker.store) == [flat(metrics) for metrics in writer.history().reports]
    (ended,) = tracker.ended
    assert tracker.described[-1].parameters == {
        "lr": 0.1, "backend": "reference", "num_workers": 1,
    }  # fmt: skip
    assert ended["state"] == "finished"
    assert ended["restarts"] == 1
    assert ended["checkpoint"] == str(directory_of(store, kept))
    assert {"goodput", "seconds/train"} <= ended.keys()
    assert send_missing(tracker, Location.of(tmp_path)) == 0
    assert len(tracker.ended) == 1


@dataclass(frozen=True)
class Rewritten(Memory):
    """Begins again each time that it is opened."""

    reopens: ClassVar[bool] = True
    is_rewritten: ClassVar[bool] = True  # type: ignore[assignment]  # it is always

    def open(self, run: TrackedRun) -> _MemorySink:
        self.store.clear()
        self.ended.clear()
        return replace(super().open(run), sent=0)


def test_a_store_that_is_written_anew_has_the_runs_end_too(tmp_path: Path) -> None:
    """Without it, a run that failed would seem to be finished."""
    with JournalWriter(tmp_path) as writer:
        for event in ("report", "commit", "report"):
            writer.do(event)
        writer.journal.write(RunConcluded(succeeded=False, stopped=None, reason="no"))
    tracker = Rewritten()
    for options, rows in (({}, 1), ({"all_rows": True}, 2)):
        assert send_missing(tracker, Location.of(tmp_path), **options) == rows
        assert [ended["state"] for ended in tracker.ended] == ["failed"]
    assert send_missing(tracker, Location.of(tmp_path)) == 0
    assert len(tracker.store) == 2


def test_a_tracker_that_raises_gets_the_rest_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable() -> None:
        raise ConnectionError("no route to the tracker.")

    broken = Memory(hook=unreachable)
    with Tracking([broken], facts_of(tmp_path), own_token=1) as tracking:
        writer = write_run(tmp_path, tracking)
    assert caplog.text.count("no route to the tracker") <= 2
    assert "no route to the tracker. Training continues" in caplog.text
    assert f"polytrain sync {tmp_path}" in caplog.text
    working = Memory()
    assert send_missing(working, Location.of(tmp_path)) == 4
    assert of(working.store) == [flat(metrics) for metrics in writer.history().reports]
    assert send_missing(working, Location.of(tmp_path)) == 0


@pytest.mark.parametrize(("end_within_s", "is_urgent"), [(0.2, False), (600.0, True)])
def test_a_tracker_that_hangs_blocks_nothing(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    end_within_s: float,
    is_urgent: bool,
) -> None:
    """Nor does it block a program that wants to end at once."""
    released, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        released.wait(60)

    monkeypatch.setattr("polytrain.trackers.tracking._END_WITHIN_S", end_within_s)
    tracker = Memory(hook=hang)
    try:
        began = time.monotonic()
        with Tracking(
            [tracker], facts_of(tmp_path), own_token=1, is_urgent=lambda: is_urgent
        ) as tracking:
            assert entered.wait(30)
            write_run(tmp_path, tracking)
        assert time.monotonic() - began < 30
    finally:
        released.set()
    assert "it takes too long. Send it with: polytrain sync" in caplog.text


def test_a_driver_that_has_lost_the_run_sends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def taken_over() -> None:
        raise RunOwnedError("it was taken over by process 7")

    tracker = Memory()
    facts = facts_of(tmp_path)
    with Tracking([tracker], facts, own_token=1, check_lease=taken_over) as tracking:
        write_run(tmp_path, tracking)
    assert tracker.store == []
    assert "is left to another driver: it was taken over by process 7" in caplog.text


def test_more_than_the_queue_holds_is_sent_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polytrain.trackers.tracking._QUEUED", 3)
    tracker = Memory()
    with Tracking([tracker], facts_of(tmp_path), own_token=1) as tracking:
        writer = write_run(tmp_path, tracking, ("report",) * 50)
    assert of(tracker.store) == [flat(metrics) for metrics in writer.history().reports]


def test_a_tracker_that_comes_back_catches_up_while_the_run_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polytrain.trackers.tracking._SEND_EVERY_S", 0.001)
    monkeypatch.setattr("polytrain.trackers.tracking._RETRY_AFTER_AT_MOST_S", 0.001)
    is_back, was_asked = threading.Event(), threading.Event()

    def unreachable() -> None:
        was_asked.set()
        if not is_back.is_set():
            raise ConnectionError("no route to the tracker")

    tracker = Memory(hook=unreachable)
    with (
        Tracking([tracker], facts_of(tmp_path), own_token=1) as tracking,
        JournalWriter(tmp_path, tracking.follow) as writer,
    ):
        for event in ("report",) * 10_500 + ("commit",):
            writer.do(event)
        assert was_asked.wait(30)
        state = next((tmp_path / "trackers").glob("memory-*.json"))
        is_back.set()
        assert tracker.has(10_500)
        # It goes on with what comes now.
        for event in ("restart",) + ("report",) * 5 + ("validate", "commit"):
            writer.do(event)
        assert tracker.has(10_506)
        assert json.loads(state.read_text())["position"]["since"] == 1
        writer.finish()
    kept = [flat(metrics) for metrics in writer.history().reports]
    assert [row for row in of(tracker.store) if "accuracy" not in row] == [
        {name: value for name, value in each.items() if name != "accuracy"} for each in kept
    ]
    assert caplog.text.count("steps behind") == 1
    assert "10500 steps behind" in caplog.text


def test_loads_that_the_journal_joins_take_no_row_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = ("load", "load", "restart", "report", "report")
    monkeypatch.setattr("polytrain.trackers.tracking._QUEUED", len(last))
    monkeypatch.setattr("polytrain.trackers.tracking._SEND_EVERY_S", 0.001)
    monkeypatch.setattr("polytrain.trackers.tracking._RETRY_AFTER_AT_MOST_S", 0.001)
    is_back = threading.Event()

    def unreachable() -> None:
        if not is_back.is_set():
            raise ConnectionError("no route to the tracker")

    tracker = Memory(hook=unreachable)
    with (
        Tracking([tracker], facts_of(tmp_path), own_token=1) as tracking,
        JournalWriter(tmp_path, tracking.follow) as writer,
    ):
        for event in ("report",) * 20 + ("commit", "load", *last):
            writer.do(event)
        is_back.set()
        assert tracker.has(20)
        writer.do("commit")
        assert tracker.has(22)
        writer.finish()


@pytest.mark.parametrize("lasting", [1, 2, 5])
def test_a_tracker_that_is_slow_gets_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: int
) -> None:
    monkeypatch.setattr("polytrain.trackers.tracking._SEND_EVERY_S", 0.001)
    monkeypatch.setattr("polytrain.trackers.tracking._RETRY_AFTER_AT_MOST_S", 0.001)
    monkeypatch.setattr("polytrain.trackers.tracking._QUEUED", lasting)
    tracker = Memory()
    with JournalWriter(tmp_path) as writer:
        for driver in (1, 2):
            facts = replace(facts_of(tmp_path), since=1)
            with Tracking([tracker], facts, own_token=driver) as tracking:
                writer.follow = tracking.follow
                writer.do("driver")
                for event in EVENTS * 10:
                    writer.do(event)
        writer.finish()
    send_missing(tracker, Location.of(tmp_path))
    rows = [row for row in of(tracker.store) if "accuracy" not in row]
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    assert [row["step"] for row in rows] == writer.history().reports.steps().tolist()


def test_show_says_how_far_a_tracker_is_behind(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    with JournalWriter(tmp_path) as writer:
        with Tracking([CSV()], facts, own_token=1) as tracking:
            writer.follow = tracking.follow
            for event in ("report", "report", "commit"):
                writer.do(event)
        # Its driver dies; the next one can't send anything, to either of two trackers.
        for state in (TrackerState.of(MLflow("http://away")), TrackerState.of(CSV("/away/m.csv"))):
            replace(state, position=replace(state.position, since=1)).write(writer.storage)
        for event in ("driver", "report", "report", "report", "commit", "report"):
            writer.do(event)
    shown = CliRunner().invoke(show, [str(tmp_path)]).output
    assert "tracker    csv is 4 steps behind: it has step 2" in shown
    assert "tracker    csv is 6 steps behind: it has step 0" in shown
    # No checkpoint covers the last step.
    assert "tracker    mlflow is 5 steps behind: it has step 0" in shown
    reported = json.loads(CliRunner().invoke(show, [str(tmp_path), "--json"]).output)["data"]
    known = {"name": "mlflow", "step": 0, "lacks": 5, "damage": None}
    assert known in reported["trackers"]
    for file in (tmp_path / "trackers").glob("csv-*"):
        file.write_text("{")
    result = CliRunner().invoke(show, [str(tmp_path)])
    assert result.output.count("damage     trackers/csv-") == 2
    assert "isn't JSON that polytrain writes" in result.output
    assert "tracker    mlflow is 5 steps behind: it has step 0" in result.output
    assert result.exception is None


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"track": "mlflw"}, "'mlflw' is not a tracker. Did you mean 'mlflow'?"),
        ({"track": 3}, "RunConfig.track: it is an int"),
        ({"track": ("csv", None)}, "None is not a tracker"),
        ({"track": [CSV("a")]}, "is a tracker, not a name. Pass it in RunConfig(observers=[…])"),
        ({"track": ("csv", "csv")}, "CSV(path=None) is given twice"),
        ({"track": [{"name": "csv"}]}, "RunConfig.track: {'name': 'csv'} is not a tracker"),
        ({"observers": (CSV(""),)}, "CSV.path: '' is not a path"),
        (
            {"observers": (CSV("~nobody-of-this-name/x"),)},
            "CSV.path: '~nobody-of-this-name/x' is below a home directory that isn't known",
        ),
        ({"observers": (CSV("a\n.csv"),)}, "CSV.path: 'a\\n.csv' is not a path"),
        ({"observers": (CSV("."),)}, "is a directory"),
        ({"observers": (CSV,)}, "it is the class CSV. Give CSV(…)"),
    ],
)
def test_what_is_wrong_is_reported_before_anything_starts(
    arguments: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(InvalidJobError) as caught:
        make_trainer("reference", lambda: None, run_config=RunConfig(**arguments))
    assert wrong in str(caught.value)


def test_a_tracker_that_is_not_installed_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorBoard, "requires", ("no_such_module",))
    with pytest.raises(InvalidJobError, match=r"no_such_module.*pip install"):
        make_trainer("reference", lambda: None, run_config=RunConfig(track="tensorboard"))


def test_sync_adds_a_tracker_to_a_run_that_had_none(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "run") as writer:
        for event in EVENTS:
            writer.do(event)
        writer.finish()
    none = CliRunner().invoke(command, [str(tmp_path / "run")])
    assert none.exit_code == 2
    assert "has no tracker. Name one of csv, mlflow, " in none.output
    unknown = CliRunner().invoke(command, [str(tmp_path / "run"), "--to", "mlflw"])
    assert unknown.exit_code == 2
    assert "there is no tracker 'mlflw'. Did you mean 'mlflow'?" in unknown.output
    done = CliRunner().invoke(command, [str(tmp_path / "run"), "--to", "csv"])
    assert done.output == "CSV(path=None): 4 steps sent\n"
    assert of(read_back(tmp_path / "run")) == [
        {OF_CSV.get(name, name): value for name, value in flat(metrics).items()}
        for metrics in writer.history().reports
    ]
    again = CliRunner().invoke(command, [str(tmp_path / "run")])
    assert again.output == "CSV(path=None): 0 steps sent\n"
