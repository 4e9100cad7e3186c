"""What a survivor saves: the last round that it has ended, or one that only a peer has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from polytrain.boosting import round_reports
from polytrain.boosting.round_reports import RoundKeeper, RoundReports
from polytrain.extension import KeptState, KeptStates, NotCleanError, Place


class Forest:
    """A model of one tree for each round."""

    trees = 0
    grows: Callable[[], None] = staticmethod(lambda: None)


class Files:
    """Writes the round and its note."""

    def note(self, model: Forest) -> dict[str, Any]:
        return {"rounds": model.trees}

    def rounds(self, model: Forest) -> int:
        return model.trees

    def write(self, model: Forest, round_: int, note: Mapping[str, Any], directory: Path) -> None:
        model.grows()
        (directory / "saved").write_text(f"round {round_} of {note['rounds']} trees")


class Rank:
    """A rank's session, to which nothing is sent."""

    can_keep = True
    copies = None
    step = 0

    def place(self) -> Place:
        return Place(step=self.step, metrics={}, positions={})

    def __init__(self) -> None:
        self.kept: list[KeptStates] = []

    def keep(self, _: RoundKeeper, *, capacity: int, size: int) -> KeptStates:
        self.kept.append(KeptStates.new(capacity))
        return self.kept[-1]


class Training:
    """Some rounds of one rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.forest, self.keeper = rank, Forest(), RoundKeeper(Files())

    def boost(self, rounds: int) -> None:
        for _ in range(rounds):
            self.forest.trees += 1
            self.keeper.ended(self.forest.trees, {"loss": 1 / self.forest.trees}, self.forest)
            self.rank.step += 1


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    rank = Rank()
    monkeypatch.setattr(round_reports, "survivor", lambda: rank)
    yield Training(rank)
    for states in rank.kept:
        states.close()


def of_peer(point: int, loss: float) -> dict[int, list[KeptState]]:
    content = msgpack.packb(({"loss": loss}, {"rounds": point}))
    return {1: [KeptState(point=point, is_forecast=False, content=content)]}


def test_the_last_round_is_saved_with_its_report(training: Training, tmp_path: Path) -> None:
    training.boost(3)
    point = training.keeper.hold(3, lambda: True)
    place = training.keeper.write({}, point, tmp_path)
    assert (tmp_path / "saved").read_text() == "round 3 of 3 trees"
    assert (place.step, place.metrics) == (3, {"loss": 1 / 3})


def test_a_round_whose_metrics_only_a_peer_has_is_saved_too(
    training: Training, tmp_path: Path
) -> None:
    training.boost(3)
    training.forest.trees += 1
    point = training.keeper.hold(4, lambda: True)
    place = training.keeper.write(of_peer(4, 0.125), point, tmp_path)
    assert (tmp_path / "saved").read_text() == "round 4 of 4 trees"
    assert (place.step, place.metrics) == (4, {"loss": 0.125})


def test_a_round_whose_trees_are_missing_is_repeated(training: Training, tmp_path: Path) -> None:
    training.boost(3)
    point = training.keeper.hold(4, lambda: False)
    place = training.keeper.write(of_peer(4, 0.125), point, tmp_path)
    assert (tmp_path / "saved").read_text() == "round 3 of 3 trees"
    assert place.step == 3


def test_a_model_that_grows_while_it_is_saved_does_not_count(
    training: Training, tmp_path: Path
) -> None:
    training.boost(3)

    def grow() -> None:
        training.forest.trees += 1

    training.forest.grows = grow
    with pytest.raises(NotCleanError, match="a round ended"):
        training.keeper.write({}, training.keeper.hold(3, lambda: True), tmp_path)


def test_before_the_first_round_there_is_nothing(training: Training) -> None:
    with pytest.raises(NotCleanError, match="hasn't finished a round"):
        training.keeper.hold(0, lambda: False)


def test_a_round_that_is_repeated_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't reported again, and takes as long as one that is."""
    seen: list[str] = []
    monkeypatch.setattr(round_reports, "beat", lambda: seen.append("repeated"))
    monkeypatch.setattr(round_reports, "survivor", Rank)
    session: Any = SimpleNamespace(
        world=SimpleNamespace(size=1, me=SimpleNamespace(rank=0)),
        report=lambda *, step, metrics, model: seen.append(f"round {step}"),
    )
    reports = RoundReports(session, reported=2)
    for round_ in (1, 2, 3):
        reports(round_, {"loss": 0.5}, Forest())
    assert seen == ["repeated", "repeated", "round 3"]
