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


def test_reports_that_the_host_of_rank_0_may_not_have_passed_on_come_with_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one more, which shows that none is missing."""
    line: Any = Line()
    survivor = Survivor(
        channel=line,
        attempt=AttemptId(token=1, attempt=0),
        rank=1,
        stagings=Stagings(scratch=tmp_path, near=None),
        place=lambda: Place(step=0, metrics={}, positions={}),
    )
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(7):
        now = 2.0 * step
        survivor.reported(step, {"loss": step})
    survivor._answer(Writer(), 9, 6, 1.0, {})
    [written] = line
    assert written[-1] == [[step, {"loss": step}] for step in (3, 4, 5)]
