"""What a survivor hands on beside its state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.staging import Stagings
from polytrain.linux.kept_states import KeptState
from polytrain.workers.session.survivor import Place, Survivor


class Line(list[Any]):
    """A channel that keeps what is sent."""

    def send(self, *messages: Any) -> None:
        self += messages


class Writer:
    def hold(self, point: int, has_time: Callable[[], bool]) -> int:
        return point

    def write(self, kept: Mapping[int, Sequence[KeptState]], point: int, directory: Path) -> Place:
        return Place(step=point, metrics={"loss": point}, positions={})


def survivor_on(line: Any, directory: Path) -> Survivor:
    return Survivor(
        channel=line,
        attempt=AttemptId(token=1, attempt=0),
        rank=1,
        stagings=Stagings(scratch=directory, near=None),
        place=lambda: Place(step=0, metrics={}, positions={}),
    )


class Forgets(Writer):
    def write(self, kept: Any, point: int, directory: Path) -> Any:
        (directory / "state").write_text("all of it")


def test_a_writer_that_returns_no_place_is_an_answer_at_once(tmp_path: Path) -> None:
    """Otherwise the run would wait for an answer until its time limit."""
    line: Any = Line()
    survivor_on(line, tmp_path)._answer(Forgets(), 9, 6, 1.0, {})
    [unwritten] = line
    assert "StateWriter.write returned None. Return a Place." in unwritten[-1]
    assert not [*tmp_path.rglob("state")]


def test_reports_that_the_host_of_rank_0_may_not_have_passed_on_come_with_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one more, which shows that none is missing."""
    line: Any = Line()
    survivor = survivor_on(line, tmp_path)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(7):
        now = 2.0 * step
        survivor.reported(step, {"loss": step})
    survivor._answer(Writer(), 9, 6, 1.0, {})
    [written] = line
    assert written[-1] == [[step, {"loss": step}] for step in (3, 4, 5)]
