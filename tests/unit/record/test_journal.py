"""The journal: a line of JSON for every transition that has a reason, written at once."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.descriptors import opened, since
from tests.unit.record.lines import write_transition

from polytrain.config.configs import FailureConfig
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import AgentsPlaced, Event, Exited, Failed, Joined, Offered, Reported
from polytrain.policy.failure import FailurePolicy
from polytrain.record.entries import (
    Entry,
    Launched,
    MetricsReported,
    Opened,
    ProcessesRequested,
    RunConcluded,
)
from polytrain.record.history import JOURNAL
from polytrain.record.journal import Journal
from polytrain.run.machine import begin, step
from polytrain.run.states import State, Transition
from polytrain.storage.location import Location
from polytrain_plugins import Offer


def journal_in(path: Path, *, token: int = 1, **options: Any) -> Journal:
    return Journal(Location.of(path, **options).open(), token=token)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / JOURNAL).read_text().splitlines()]


def write_run(journal: Journal, *events: Event) -> None:
    """Let a run of one worker live through the events."""
    transition = begin(
        State(world_size=1, policy=FailurePolicy(config=FailureConfig(max_failures=1)))
    )
    write_transition(journal, None, transition)
    for event in events:
        transition = step(transition.state, event)
        write_transition(journal, event, transition)


FAILED = Failed(
    attempt=0, failure=Failure(kind=FailureKind.USER_ERROR, rank=0, message="ValueError: é\n")
)
GONE = Exited(attempt=0, rank=0, how="exited with code 0", killed=False)


def test_every_transition_is_reported_with_its_reason(tmp_path: Path) -> None:
    before = time.time()
    with journal_in(tmp_path) as journal:
        write_run(
            journal,
            AgentsPlaced(nodes=("node",)),
            Offered(attempt=0, rank=0, offer=Offer()),
            FAILED,
        )
    written = lines(tmp_path)
    assert [(line["event"], line["phase"]) for line in written] == [
        ("Begun", "Placing"),
        ("AgentsPlaced", "Gathering"),
        ("Offered", "Training"),
        ("Failed", "Ending"),
    ]
    assert written[-1]["reason"] == "rank 0: before it had joined the others: ValueError: é\n"
    assert all(line["reason"] for line in written)
    times = [line["time"] for line in written]
    assert before <= min(times) <= max(times) <= time.time()


def test_a_restart_counts_the_generation(tmp_path: Path) -> None:
    with journal_in(tmp_path) as journal:
        write_run(journal, AgentsPlaced(nodes=("node",)), FAILED, GONE)
    assert [line["attempt"] for line in lines(tmp_path)] == [0, 0, 0, 1]
    assert "failure 1 of max_failures=1" in lines(tmp_path)[-1]["reason"]


def test_what_changes_nothing_is_left_out(tmp_path: Path) -> None:
    late = Offered(attempt=7, rank=0, offer=Offer())
    with journal_in(tmp_path) as journal:
        write_run(journal, AgentsPlaced(nodes=("node",)), late)
    assert [line["event"] for line in lines(tmp_path)] == ["Begun", "AgentsPlaced"]


def test_lines_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    """What has been written survives the driver's death."""
    with journal_in(tmp_path) as journal:
        write_run(journal, AgentsPlaced(nodes=("node",)))
        assert len(lines(tmp_path)) == 2


def test_a_driver_its_generations_and_reports_are_reported(tmp_path: Path) -> None:
    with journal_in(tmp_path, token=3) as journal:
        identity = {"backend": "reference"}
        journal.write(Opened(anew=True, identity=identity, world_size=2))
        journal.write(
            Launched(
                attempt=0,
                step=40,
                start="/run/checkpoint",
                world_size=2,
                hosts=["a", "b"],
                gpus=[0, 0],
            )
        )
        journal.write(ProcessesRequested(attempt=0))
        journal.report(
            Reported(
                attempt=0,
                rank=0,
                step=41,
                metrics={"loss": 0.5, "text": "a\nb\u2028é"},
            )
        )
        journal.report(Reported(attempt=0, rank=0, step=42, metrics={}, stalled_s=0.25))
        journal.write(RunConcluded(stopped=None, succeeded=False, reason="no restart is left"))
        journal.closed()
    written = lines(tmp_path)
    assert {line["token"] for line in written} == {3}
    assert [{k: v for k, v in line.items() if k not in ("token", "time")} for line in written] == [
        {
            "event": "Opened",
            "format": 6,
            "anew": True,
            "identity": {"backend": "reference"},
            "world_size": 2,
        },
        {
            "event": "Launched",
            "attempt": 0,
            "step": 40,
            "start": "/run/checkpoint",
            "world_size": 2,
            "hosts": ["a", "b"],
            "gpus": [0, 0],
        },
        {"event": "Started", "attempt": 0},
        {"event": "Reported", "step": 41, "metrics": {"loss": 0.5, "text": "a\nb\u2028é"}},
        {"event": "Reported", "n": 1, "step": 42, "metrics": {}, "stalled_s": 0.25},
        {
            "event": "Concluded",
            "succeeded": False,
            "stopped": None,
            "reason": "no restart is left",
        },
        {"event": "Closed"},
    ]


def test_a_rank_that_joins_is_reported_with_its_place_and_rows(tmp_path: Path) -> None:
    known = Joined(attempt=0, rank=1, rows={"train": 3}, device="CPU", node="a")
    state = State(world_size=2, policy=FailurePolicy(), attempt=0)
    with journal_in(tmp_path) as journal:
        for event in (known, Joined(attempt=0, rank=0)):
            write_transition(journal, event, Transition(state=state, reason="it joined"))
    first, second = lines(tmp_path)
    assert (first["rank"], first["rows"], first["device"], first["node"]) == (
        1,
        {"train": 3},
        "CPU",
        "a",
    )
    assert second["rank"] == 0
    assert "rows" not in second


def test_a_journal_is_appended_to(tmp_path: Path) -> None:
    for token in (1, 2):
        with journal_in(tmp_path, token=token) as journal:
            write_run(journal)
    assert [line["token"] for line in lines(tmp_path)] == [1, 2]


def test_a_line_that_a_dying_driver_has_torn_spoils_no_other(tmp_path: Path) -> None:
    with journal_in(tmp_path) as journal:
        write_run(journal, AgentsPlaced(nodes=("node",)))
    file = tmp_path / JOURNAL
    file.write_bytes(file.read_bytes()[:-20])
    with journal_in(tmp_path, token=2) as journal:
        write_run(journal)
    first, torn, last = file.read_text().splitlines()
    assert json.loads(first)["token"] == 1
    assert json.loads(last)["token"] == 2
    with pytest.raises(ValueError, match="char"):
        json.loads(torn)


def test_what_is_in_memory_alone_is_bounded_by_syncs() -> None:
    """A run in object storage may make no checkpoints, and millions of reports."""
    location = Location.of("runs", MemoryFileSystem(), retry_s=0)
    with Journal(location.open(), token=1) as journal:
        journal.write(Opened(anew=True, identity={}, world_size=1))
        assert not journal.wants_sync
        step = 0
        while not journal.wants_sync:
            step += 1
            metrics = {"text": "x" * 1000}
            journal.report(Reported(attempt=0, rank=0, step=step, metrics=metrics))
        assert 4_000 < step < 9_000
        journal.sync()
        assert not journal.wants_sync


def test_a_journal_whose_end_cannot_be_written_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that trains many models on a full disk could open no more files at last."""

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = opened()
    with journal_in(tmp_path, retry_s=0) as journal:
        journal.write(Opened(anew=True, identity={}, world_size=1))
        journal.report(Reported(attempt=0, rank=0, step=1, metrics={"loss": 0.5}))
        monkeypatch.setattr("os.write", full)
    assert "The end of the journal can't be written: [Errno 28]" in caplog.text
    # What earlier tests have left is closed at any time, and its number is free then.
    assert since(before) == {}


def test_a_report_that_is_not_kept_is_passed_on_and_leaves_nothing(tmp_path: Path) -> None:
    followed: list[Entry] = []
    with journal_in(tmp_path) as journal:
        journal.news.subscribe(followed.append)
        before = lines(tmp_path)
        for rank in range(1, 1000):
            report = Reported(attempt=0, rank=rank, step=1, metrics={"loss": 0.5})
            journal.report(report, is_kept=False)
        assert lines(tmp_path) == before
        assert not journal.history.of_other_ranks
        assert not journal._drafts, "each later line would cost time for each of these ranks"
    assert [(each.rank, each.step) for each in followed if isinstance(each, MetricsReported)] == [
        (rank, 1) for rank in range(1, 1000)
    ]


def test_a_report_that_a_survivor_has_made_says_so_among_many(tmp_path: Path) -> None:
    """Many reports make one line in columns, which has no room for it."""
    with journal_in(tmp_path) as journal:
        for step in range(1, 100):
            survivor = 3 if step == 50 else None
            report = Reported(attempt=0, rank=0, step=step, metrics={"a": 1}, survivor=survivor)
            journal.report(report)
    reports = [each for each in lines(tmp_path) if each["event"] == "Reported"]
    assert [(each["step"], each["survivor"]) for each in reports] == [(50, 3)]
    assert len(lines(tmp_path)) == 3
