"""ARCHITECTURE.md draws every way from one phase of a run to another, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.run.play import Play, exited, placed, raised, storage_failure

from polytrain.events.attempt import PlacementFailed, stop_wanted
from polytrain_plugins import Stopped

PAGE = (Path(__file__).parents[3] / "ARCHITECTURE.md").read_text()
DRAWN = re.findall(
    r"^\| (\w+) \| (\w+) \| (?!what leads to it)",
    PAGE.partition("## The state machine")[2].partition("\n## ")[0],
    re.MULTILINE,
)
STOP = stop_wanted(Stopped(by="observer", reason="enough"))


def placing() -> Play:
    return Play(2, max_failures=1)


def gathering() -> Play:
    return placing().launched()


def training() -> Play:
    return gathering().training()


def leaving() -> Play:
    return training().leaving()


def ending() -> Play:
    return training().tell(exited(0, killed=False))


def moving() -> Play:
    """One rank of two is left of an attempt whose agents are to be others."""
    play = Play(2, max_failures=-1, node_cooldown_s=60.0).launched()
    for attempt in range(2):
        play.training().tell(exited(0, attempt, killed=False))
        if attempt == 0:
            play.tell(exited(1, attempt, killed=True))
    return play


WAYS: dict[tuple[str, str], Callable[[], Play]] = {
    ("Placing", "Gathering"): lambda: placing().tell(placed(2)),
    ("Placing", "Concluded"): lambda: placing().tell(PlacementFailed(reason="no node")),
    ("Gathering", "Training"): lambda: gathering().training(),
    ("Gathering", "Ending"): lambda: gathering().tell(STOP),
    ("Training", "Leaving"): lambda: training().leaving(),
    ("Training", "Ending"): lambda: training().tell(raised(1)),
    ("Leaving", "Ending"): lambda: leaving().tell(storage_failure(0)),
    ("Leaving", "Concluded"): lambda: leaving().tell(
        exited(0, killed=False), exited(1, killed=False)
    ),
    ("Ending", "Placing"): lambda: moving().tell(exited(1, 1, killed=True)),
    ("Ending", "Gathering"): lambda: ending().tell(exited(1, killed=True)),
    ("Ending", "Concluded"): lambda: ending().tell(STOP, exited(1, killed=True)),
}


def test_the_page_draws_each_way_once() -> None:
    assert sorted(DRAWN) == sorted(WAYS)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_run_takes_each_way(before: str, after: str) -> None:
    assert WAYS[before, after]().phases[-2:] == [before, after]
