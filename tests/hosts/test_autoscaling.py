"""Runs on a cluster that Ray's autoscaler grows and shrinks: nodes come because a run asks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.journals import journal
from tests.e2e.test_exactly_once import EPOCHS, ROWS, STEPS_PER_EPOCH, Diary
from tests.hosts.cloud import Cloud, cloud

from polytrain.testing.processes import eventually

# On a busy machine a node of Ray takes a minute to start. In `make test`, `test_growing_cluster`
# has the autoscaler add nodes.
pytestmark = [pytest.mark.timeout(600), pytest.mark.only_in_sweep]

_DRIVER = Path(__file__).with_name("autoscaled_driver.py")
_PATIENCE_S = 200
"""Seconds for what takes Ray, and a node, a few on an idle machine."""


@contextmanager
def driver(cluster: Cloud, directory: Path, **scaling: Any) -> Iterator[subprocess.Popen[str]]:
    """A driver on the head, which holds its run at its fourth step: see `autoscaled_driver`."""
    directory.mkdir(exist_ok=True)
    process = cluster.head.start(
        [sys.executable, _DRIVER, directory, json.dumps({"start_timeout_s": 300, **scaling})],
        env=cluster.driver_env,
        output=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()


def sizes(directory: Path) -> list[int]:
    """World size of every attempt so far."""
    begun = (directory / "run" / "journal.jsonl").exists()
    return [line["world_size"] for line in journal(directory / "run", "Launched")] if begun else []


def failures(directory: Path) -> list[str]:
    ended = [line.get("failure") for line in journal(directory / "run", "AttemptEnded")]
    return [failure["kind"] for failure in ended if failure]


def has_size(directory: Path, size: int, *, after: int = 0) -> bool:
    """Whether an attempt of this size begins, after so many others."""
    return eventually(lambda: size in sizes(directory)[after:][-1:], _PATIENCE_S)


def ended(process: subprocess.Popen[str], directory: Path) -> str:
    """Let a run go on to its end; return what its driver printed."""
    (directory / "go-on").touch()
    output, _ = process.communicate(timeout=_PATIENCE_S)
    return output


def assert_all_given_back(cluster: Cloud) -> None:
    """And no node is asked for meanwhile."""
    asked = set(cluster.asked)
    assert eventually(lambda: not cluster.machines, _PATIENCE_S)
    assert set(cluster.asked) == asked


def assert_exactly_once(directory: Path) -> None:
    steps = Diary(directory / "diary").steps_that_count()
    assert sorted(steps) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    for epoch in range(EPOCHS):
        first = epoch * STEPS_PER_EPOCH + 1
        used = [row for step in range(first, first + STEPS_PER_EPOCH) for row in steps[step]]
        assert sorted(used) == list(range(ROWS))


def test_a_run_grows_when_its_node_comes_which_is_given_back_in_the_end(tmp_path: Path) -> None:
    with (
        cloud(tmp_path, machines=1) as cluster,
        driver(cluster, tmp_path, num_workers=[1, 2]) as process,
    ):
        assert has_size(tmp_path, 2)
        assert "FINISHED True" in ended(process, tmp_path)
        assert_all_given_back(cluster)
        [asked_at] = cluster.asked.values()
        [launched_at] = [
            line["time"] for line in journal(tmp_path / "run", "Launched") if line["attempt"] == 1
        ]
        reports = journal(tmp_path / "run", "Reported")
        stepped_at = next(line["time"] for line in reports if line["time"] > launched_at)
        print(f"a node asked for: training there after {launched_at - asked_at:.1f} s", end="")
        print(f", the first step after {stepped_at - asked_at:.1f} s")
    assert sizes(tmp_path) == [1, 2]
    assert failures(tmp_path) == []
    assert_exactly_once(tmp_path)


def test_a_run_of_a_fixed_size_waits_for_its_nodes_and_keeps_them(tmp_path: Path) -> None:
    with (
        cloud(tmp_path, machines=2) as cluster,
        driver(cluster, tmp_path, num_workers=3) as process,
    ):
        assert has_size(tmp_path, 3)
        # The run stands still for much longer than the autoscaler leaves an idle node alone.
        looks = cluster.looks
        assert eventually(lambda: cluster.looks > looks + 12, _PATIENCE_S)
        assert cluster.given_back == []
        printed = ended(process, tmp_path)
        assert "FINISHED True" in printed
        assert_all_given_back(cluster)
    assert sizes(tmp_path) == [3]
    assert_exactly_once(tmp_path)


@pytest.mark.parametrize(
    ("notice_s", "strategy"), [(0, "PACK"), (20, "PACK"), (0, "SPREAD"), (20, "SPREAD")]
)
def test_a_run_goes_on_with_fewer_and_gets_another_node(
    tmp_path: Path, notice_s: int, strategy: str
) -> None:
    scaling = {"num_workers": [1, 3], "placement_strategy": strategy}
    with (
        cloud(tmp_path, machines=3) as cluster,
        driver(cluster, tmp_path, **scaling) as process,
    ):
        assert has_size(tmp_path, 3)
        before = len(sizes(tmp_path))
        cluster.preempt(next(iter(cluster.running.values())), notice_s=notice_s)
        assert eventually(lambda: len(sizes(tmp_path)) > before, _PATIENCE_S)
        assert has_size(tmp_path, 3, after=before)
        assert "FINISHED True" in ended(process, tmp_path)
        assert_all_given_back(cluster)
    assert sizes(tmp_path)[before] == 2
    assert failures(tmp_path) == ([] if notice_s else ["NODE_LOST"])
    assert_exactly_once(tmp_path)


def test_a_run_of_a_fixed_size_that_loses_a_node_says_what_it_waits_for(tmp_path: Path) -> None:
    with (
        cloud(tmp_path, machines=2) as cluster,
        driver(cluster, tmp_path, num_workers=2) as process,
    ):
        assert has_size(tmp_path, 2)
        [lost] = cluster.running.values()
        cluster.preempt(lost)
        assert has_size(tmp_path, 2, after=1)
        printed = ended(process, tmp_path)
    assert "FINISHED True" in printed
    assert "2 workers of 1 CPU each, 1 of them ready; " in printed
    assert f"Room is still reserved on {lost.address}, lost" in printed
    # Ray starts nodes once it knows of the loss, which may be after the run has printed this.
    assert "its autoscaler has been asked for them" in printed
    assert_exactly_once(tmp_path)


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_no_node_is_asked_for_after_a_run(tmp_path: Path, strategy: str) -> None:
    """It has ended, or its driver was killed, before the nodes came for which it asked."""
    scaling = {"num_workers": [1, 2], "placement_strategy": strategy}
    with cloud(tmp_path, machines=2) as cluster:
        (tmp_path / "short").mkdir()
        (tmp_path / "short" / "go-on").touch()
        with driver(cluster, tmp_path / "short", **scaling) as process:
            assert eventually(lambda: len(cluster.asked) == 1, _PATIENCE_S)
            assert "FINISHED True" in ended(process, tmp_path / "short")
        assert_all_given_back(cluster)
        with driver(cluster, tmp_path / "killed", **scaling) as process:
            assert eventually(lambda: len(cluster.asked) == 2, _PATIENCE_S)
            process.kill()
            assert_all_given_back(cluster)
