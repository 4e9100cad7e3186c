"""The journal: a line of JSON for every transition that has a reason, written at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from polytrain.errors import Failure, FailureKind
from polytrain.policy.failure import FailurePolicy
from polytrain.run.events import AgentsPlaced, Event, Exited, Failed, Offered
from polytrain.run.journal import Journal
from polytrain.run.machine import begin, step
from polytrain.run.states import State
from polytrain_plugins import Offer


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_run(journal: Journal, *events: Event) -> None:
    """Let a run of one worker live through the events."""
    transition = begin(State(world_size=1, policy=FailurePolicy(max_failures=1)))
    journal.transition(None, transition)
    for event in events:
        transition = step(transition.state, event)
        journal.transition(event, transition)


FAILED = Failed(
    generation=0, failure=Failure(kind=FailureKind.USER_ERROR, rank=0, message="ValueError: é\n")
)
GONE = Exited(generation=0, rank=0, how="exited with code 0", killed=False)


def test_every_transition_is_told_with_its_reason(tmp_path: Path) -> None:
    path, before = tmp_path / "journal.jsonl", time.time()
    with Journal(path) as journal:
        write_run(journal, AgentsPlaced(), Offered(generation=0, rank=0, offer=Offer()), FAILED)
    written = lines(path)
    assert [(line["event"], line["phase"]) for line in written] == [
        ("Begun", "Placing"),
        ("AgentsPlaced", "Gathering"),
        ("Offered", "Training"),
        ("Failed", "Ending"),
    ]
    assert written[-1]["reason"] == "rank 0: ValueError: é\n"
    assert all(line["reason"] for line in written)
    times = [line["time"] for line in written]
    assert before <= min(times) <= max(times) <= time.time()


def test_a_restart_counts_the_generation(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        write_run(journal, AgentsPlaced(), FAILED, GONE)
    assert [line["generation"] for line in lines(path)] == [0, 0, 0, 1]
    assert "failure 1 of max_failures=1" in lines(path)[-1]["reason"]


def test_what_changes_nothing_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    late = Offered(generation=7, rank=0, offer=Offer())
    with Journal(path) as journal:
        write_run(journal, AgentsPlaced(), late)
    assert [line["event"] for line in lines(path)] == ["Begun", "AgentsPlaced"]


def test_lines_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    """What has been written survives the driver's death."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        write_run(journal, AgentsPlaced())
        assert len(lines(path)) == 2


def test_a_journal_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for _ in range(2):
        with Journal(path) as journal:
            write_run(journal)
    assert len(lines(path)) == 2
