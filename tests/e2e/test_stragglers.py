"""A rank that holds the others up: named once, moved to another agent where that is wanted."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.e2e.journals import journal
from tests.e2e.test_elastic import At, agents, progress_pages

import polytrain
from polytrain import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig, make_trainer
from polytrain.events.attempt import Load
from polytrain.policy.stragglers import Straggler, StragglerDetector
from polytrain.storage.location import Location
from polytrain.testing.processes import eventually
from polytrain.view.page.reading import read_facts

# Which rank is busy is what they measure.
pytestmark = pytest.mark.alone

WINDOW_S = 0.5
WORK_S = 0.02
"""Of CPU time: what a step takes."""

STEPS = 12
MEETING, HELD_UP, SECOND_MEETING, HELD_UP_AGAIN = 2, 4, 9, 10
"""Steps at which the test looks at the agents, and at which a rank holds the other up."""


def work(seconds: float = WORK_S) -> None:
    import time

    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def any_of(flag: bool) -> bool:
    """Whether it is so on any rank."""
    import torch

    total = torch.tensor(float(flag))
    torch.distributed.all_reduce(total)
    return total.item() > 0


def until_known(config: dict[str, Any]) -> None:
    """Take steps until a file is there; who works in a step is up to `workers`."""
    step, rank = 0, polytrain.get_context().get_world_rank()
    while not any_of(Path(config["enough"]).exists()):
        step += 1
        if config["workers"][step % len(config["workers"])] == rank:
            work()
        polytrain.heartbeat()


def a_fixed_amount(config: dict[str, Any]) -> None:
    """Have rank 1 hold the other up for some windows."""
    for _ in range(int(4 * WINDOW_S / WORK_S)):
        if polytrain.get_context().get_world_rank() == 1:
            work()
        polytrain.heartbeat()
        any_of(False)


def moves(config: dict[str, Any]) -> None:
    """Count steps; at some, rank 1 holds the other up until it is noticed."""
    import tempfile
    import time

    directory, context = Path(config["directory"]), polytrain.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    (directory / f"page-{attempt}-{rank}").write_text(str(progress_pages("self").pop()))
    checkpoint, step, total = polytrain.get_checkpoint(), 0, 0
    if checkpoint is not None:
        step, total = json.loads((Path(checkpoint.path) / "state.json").read_text())
    while step < STEPS:
        step, total = step + 1, total + step
        while step in (MEETING, SECOND_MEETING) and not (directory / f"seen-{step}").exists():
            time.sleep(0.005)
        while step == config["slow"].get(attempt):
            if rank == 1:
                work()
            polytrain.heartbeat()
            is_known = (directory / f"known-{attempt}").exists()
            if any_of(polytrain.checkpoint_requested() or is_known):
                break
        any_of(False)
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "state.json").write_text(json.dumps([step, total]))
            made = Checkpoint.from_directory(place) if rank == 0 else None
            polytrain.report({"step": step, "total": total}, checkpoint=made)


def fit(
    function: Callable[[dict[str, Any]], None],
    path: Path,
    config: dict[str, Any],
    *,
    stragglers: Literal["report", "replace", "ignore"] = "report",
    observers: tuple[Any, ...] = (),
) -> Result:
    failure = FailureConfig(stragglers=stragglers, straggler_window_s=WINDOW_S)
    return make_trainer(
        "torch",
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, standby=int(stragglers == "replace")),
        run_config=RunConfig(
            storage_path=path,
            name="run",
            progress=False,
            failure_config=failure,
            observers=observers,
        ),
    ).fit()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "holds the others up" in r.getMessage()]


@pytest.fixture
def enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once both ranks have told of six windows."""
    file, take = tmp_path / "enough", StragglerDetector.take
    windows: dict[int, int] = {0: 0, 1: 0}

    def taken(pace: StragglerDetector, load: Load) -> list[Straggler]:
        windows[load.rank] += 1
        if min(windows.values()) == 6:
            file.touch()
        return take(pace, load)

    monkeypatch.setattr(StragglerDetector, "take", taken)
    return file


def test_the_rank_that_the_other_waits_for_is_named_once(
    tmp_path: Path, enough: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fit(until_known, tmp_path, {"enough": str(enough), "workers": [1]})
    [warning] = warnings_of(caplog)
    assert warning.startswith("Rank 1 on host ")
    assert "of the last 0.5 s" in warning
    assert "FailureConfig(stragglers='replace')" in warning
    [line] = journal(tmp_path / "run", "Straggler")
    assert (line["rank"], line["attempt"]) == (1, 0)
    assert line["host"] in warning
    assert line["reason"] in warning.replace("Rank", "rank", 1)
    # A process that has imported torch takes this much at least.
    loads = journal(tmp_path / "run", "Load")
    assert min(memory for load in loads for memory in load["memory"]) > 50e6
    first, second = read_facts(Location.of(tmp_path / "run")).ranks
    assert second.busy > first.busy
    assert {(each.node, each.device) for each in (first, second)} == {(os.uname().nodename, "CPU")}


def test_ranks_that_wait_for_each_other_in_turn_are_not_accused(
    tmp_path: Path, enough: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fit(until_known, tmp_path, {"enough": str(enough), "workers": [0, 1]})
    assert warnings_of(caplog) == []
    assert "Straggler" not in {line["event"] for line in journal(tmp_path / "run")}


def test_whoever_ignores_stragglers_hears_nothing_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fit(a_fixed_amount, tmp_path, {}, stragglers="ignore")
    assert warnings_of(caplog) == []
    assert "Straggler" not in {line["event"] for line in journal(tmp_path / "run")}


@pytest.mark.on_ray
def test_a_straggler_is_moved_and_nobody_else_and_not_again_if_it_is_slow_there_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[int, int]] = []
    take = StragglerDetector.take

    def taken(pace: StragglerDetector, load: Load) -> list[Straggler]:
        found = take(pace, load)
        if found and pace.attempt == 1:
            (tmp_path / "known-1").touch()
        return found

    monkeypatch.setattr(StragglerDetector, "take", taken)

    def meet(step: int, attempt: int) -> At:
        def look() -> None:
            # The host of both ranks, and the standby's.
            assert eventually(lambda: len(agents()) == 2)
            seen.append({rank: agent_of(tmp_path / f"page-{attempt}-{rank}") for rank in (0, 1)})
            (tmp_path / f"seen-{step}").touch()

        return At(step - 1, look)

    with caplog.at_level(logging.WARNING):
        result = fit(
            moves,
            tmp_path,
            {"directory": str(tmp_path), "slow": {0: HELD_UP, 1: HELD_UP_AGAIN}},
            stragglers="replace",
            observers=(meet(MEETING, 0), meet(SECOND_MEETING, 1)),
        )
    before, after = seen
    assert before[0] == before[1] == after[0]
    assert after[1] != before[1]
    moved, stays = warnings_of(caplog)
    assert moved.startswith("Rank 1 ")
    assert "A standby replaces it" in moved
    assert "It has been moved before" in stays
    assert [line["attempt"] for line in journal(tmp_path / "run", "Straggler")] == [0, 1]
    assert (result.error, result.metrics) == (None, {"step": STEPS, "total": sum(range(STEPS))})
    # It went on from the very step that it was held up at; no failure was allowed, nor charged.
    launched = [line["step"] for line in journal(tmp_path / "run", "Launched")]
    assert launched == [0, HELD_UP]
    assert [report["step"] for report in result.history] == list(range(1, STEPS + 1))


def agent_of(page: Path) -> int:
    """The host of the agent whose worker process has written down its page's memory."""
    inode = int(page.read_text())
    [agent] = [agent.pid for agent in agents() if inode in progress_pages(agent.pid)]
    return agent
