"""Nodes that are lost, that say that they will be, and that keep losing workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Runs = dict[str, dict[str, Any]]


pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """What became of each run, by the name of what befell it."""
    script = Path(__file__).with_name("node_losses.py")
    directory = tmp_path_factory.mktemp("losses")
    run = subprocess.run(
        [sys.executable, script, *(["sweep"] if request.config.getoption("--sweep") else [])],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
    )
    results = directory / "results.jsonl"
    assert results.exists(), run.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    found = {line.pop("scenario"): line for line in lines}
    return found


def kinds(run: dict[str, Any]) -> list[str | None]:
    return [failure and failure["kind"] for failure in run["ends"]]


def test_a_standby_on_another_node_takes_the_rank_of_a_lost_node_and_no_other(runs: Runs) -> None:
    run = runs["node_is_lost_and_a_standby_is_there"]
    assert run["finished"], run
    assert run["sizes"] == [2, 2]
    assert kinds(run) == ["NODE_LOST"]
    assert run["ends"][0]["rank"] == 1
    where = run["nodes"]
    # Three nodes with room for one each: it stood by on the third, and was there at once.
    assert where["1.0"] == where["0.0"]
    assert len({where["0.0"], where["0.1"], where["1.1"]}) == 3
    assert len(run["before"]) == 3
    assert set(run["after"]) < set(run["before"])
    assert len(run["after"]) == 2


def test_an_elastic_run_without_standbys_goes_on_with_those_that_are_left(runs: Runs) -> None:
    run = runs["node_is_lost_and_nobody_stands_by"]
    assert run["finished"], run
    assert run["sizes"] == [2, 1]
    assert kinds(run) == ["NODE_LOST"]
    assert run["nodes"]["1.0"] == run["nodes"]["0.0"]


def test_a_run_leaves_a_node_that_is_announced_to_go_after_a_checkpoint(runs: Runs) -> None:
    run = runs["node_is_announced_to_go"]
    # No failure was allowed: nothing was charged.
    assert run["finished"], run
    assert run["sizes"] == [2, 2]
    assert kinds(run) == [None]
    assert run["starts"][0] is None
    assert "checkpoint_" in run["starts"][1]
    assert run["nodes"]["1.1"] != run["nodes"]["0.1"]
    # The node was to go a minute after the announcement.
    assert {tuple(known["ranks"]) for known in run["preemptions"]} == {(1,)}
    assert all(0 < known["left_s"] < 60 for known in run["preemptions"])


def test_a_node_that_goes_as_it_had_announced_is_charged_to_nobody(runs: Runs) -> None:
    run = runs["node_goes_before_there_is_a_checkpoint"]
    assert run["finished"], run
    assert kinds(run) == ["PREEMPTED"]
    assert run["sizes"] == [2, 2]
    assert run["nodes"]["1.1"] != run["nodes"]["0.1"]


def test_a_node_that_loses_two_workers_is_left_if_another_can_hold_them(runs: Runs) -> None:
    run = runs["node_loses_two_workers"]
    assert run["finished"], run
    assert kinds(run) == ["WORKER_LOST", "WORKER_LOST"]
    first, second, third = (
        {run["nodes"][f"{attempt}.{rank}"] for rank in (0, 1)} for attempt in range(3)
    )
    assert first == second
    assert run["nodes"]["1.1"] not in third


# In `make test`, `test_worker_pool` has workers that stay because no other node holds them.
@pytest.mark.only_in_sweep
def test_a_node_that_loses_two_workers_is_kept_if_no_other_can_hold_them(runs: Runs) -> None:
    run = runs["node_loses_two_workers_and_there_is_no_other"]
    assert run["finished"], run
    assert run["nodes"]["2.1"] == run["nodes"]["1.1"] == run["nodes"]["0.1"]
