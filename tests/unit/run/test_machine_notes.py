"""What the state machine remembers of reports and checkpoints, which need no decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
from tests.unit.checkpoint.checkpoints import manifest
from tests.unit.run.play import Play, exited, reported, storage_failure

from polytrain.checkpoint.parts import (
    CheckpointEvent,
    Committed,
    PartStaged,
    PartStored,
    PartVoid,
)
from polytrain.config.configs import FailureConfig
from polytrain.errors import FailureKind
from polytrain.events.attempt import ConditionMet, Diverged, Drained, stop_wanted
from polytrain.events.notices import Rollback, Skipped
from polytrain.policy.failure import FailurePolicy
from polytrain.record.entries import DivergenceFound, Transitioned, decoded, encoded
from polytrain.run.machine import note, step
from polytrain.run.states import EndAttempt, Launch, entries_of
from polytrain.workers.agents.calls import Kill
from polytrain_plugins import Stopped

STORED = PartStored(attempt=0, rank=0, checkpoint=0, step=1, metrics={}, positions={}, files=())
VOID = PartVoid(attempt=0, rank=1, checkpoint=4, reason="'model' was written to")
COMMITTED = Committed(manifest=manifest(4, step=7), stamps={})


def second_attempt() -> Play:
    play = Play(2, max_failures=1).launched().training()
    return play.tell(exited(1, killed=False), exited(0, killed=True)).training()


@pytest.mark.parametrize("event", [STORED, VOID, COMMITTED], ids=lambda event: type(event).__name__)
def test_what_has_become_of_a_part_counts_whenever_it_comes(event: CheckpointEvent) -> None:
    """The files and the manifest outlive the worker processes that they are of."""
    training = Play(2, max_failures=1).launched().training()
    ending = Play(2, max_failures=1).launched().training().tell(exited(0, killed=False))
    for play in (training, ending, second_attempt(), Play(2).launched().training().leaving()):
        assert note(play.state, event) is not None


def test_an_attempt_starts_from_the_newest_commit() -> None:
    play = Play(2).launched().training().tell(COMMITTED)
    assert play.state.committed == 7


def test_reports_and_staged_parts_of_another_attempt_do_not_count() -> None:
    play = second_attempt()
    staged = PartStaged(attempt=0, rank=1, checkpoint=4, waits=False)
    assert note(play.state, staged) is None
    assert note(play.state, reported(0, 3)) is None
    noted = note(play.state, reported(1, 3, attempt=1))
    assert noted is not None
    assert (noted.steps[1], noted.has_reported) == (3, True)


def test_nothing_counts_once_the_run_is_over() -> None:
    play = Play(1).launched().training().leaving().tell(exited(0, killed=False))
    assert play.conclusion().succeeded
    assert [note(play.state, event) for event in (STORED, COMMITTED, reported(0, 1))] == [None] * 3


def test_a_failure_that_is_reported_twice_counts_once() -> None:
    play = Play(2).launched().training().tell(storage_failure(None), storage_failure(None))
    play.tell(exited(0, killed=True), exited(1, killed=True))
    assert len(play.conclusion().failures) == 1


def diverged(
    rank: int,
    *,
    step: int,
    good_step: int,
    problem: str = "",
    attempt: int = 0,
    skipped: Mapping[str, tuple[Skipped, ...]] | None = None,
) -> Diverged:
    found = Rollback(
        attempt=attempt,
        rank=rank,
        step=step,
        good_step=good_step,
        reason="loss is nan",
        skipped=skipped or {},
    )
    return Diverged(attempt=attempt, found=found, problem=problem)


def with_rollbacks(
    play: Play, how: Literal["rollback", "fail"] = "rollback", *, leaves_out: bool = False
) -> Play:
    on_rollback = None if leaves_out else lambda config, rollback: config
    config = FailureConfig(on_divergence=how, max_rollbacks=1, on_rollback=on_rollback)
    play.state = replace(play.state, policy=FailurePolicy(config=config))
    return play


def test_an_attempt_that_diverges_is_followed_by_another_from_before_it() -> None:
    """Rank 0 has committed what rank 1 then finds to be bad."""
    play = with_rollbacks(Play(2)).launched().training().tell(COMMITTED)
    play.tell(diverged(1, step=7, good_step=6))
    assert [type(action) for action in play.latest] == [Kill]
    play.tell(exited(0, killed=True), exited(1, killed=True))
    ended, launch = play.latest
    assert isinstance(ended, EndAttempt)
    assert isinstance(launch, Launch)
    assert ended.root is not None
    assert (ended.root.kind, ended.root.rank) == (FailureKind.DIVERGED, 1)
    assert play.state.committed == 6


def test_a_survivors_state_that_is_discarded_uses_up_no_rollback() -> None:
    """An attempt begins with it, and its first report is bad: nothing is left out yet."""
    play = with_rollbacks(Play(1), leaves_out=True).launched()
    found: list[Mapping[str, tuple[Skipped, ...]]] = [{}, {"train": ((0, 4, 8),)}]
    for attempt, skipped in enumerate(found):
        play.training()
        play.tell(diverged(0, step=7, good_step=6, attempt=attempt, skipped=skipped))
        play.tell(exited(0, killed=True, attempt=attempt))
        ended, launch = play.latest
        assert isinstance(ended, EndAttempt)
        assert isinstance(launch, Launch)
    assert ended.reason.startswith("rollback 1 of max_rollbacks=1, without positions 4 to 7")


@pytest.mark.parametrize("order", ["condition first", "divergence first", "at a planned end"])
@pytest.mark.parametrize("how", ["rollback", "fail"])
def test_a_condition_that_is_met_by_what_has_diverged_finishes_no_run(order: str, how: Any) -> None:
    """Rank 0 has met the condition at step 10, and its checkpoint is committed late."""
    play = with_rollbacks(Play(2), how).launched().training()
    stopped = Stopped(by="condition", reason="training_step", step=10)
    met = ConditionMet(attempt=0, rank=0, stopped=stopped)
    bad = diverged(1, step=10, good_step=9)
    if order == "at a planned end":
        play.tell(met, Drained(attempt=0, rank=0), bad)
    else:
        play.tell(*((met, bad) if order == "condition first" else (bad, met)))
    play.tell(Committed(manifest=manifest(4, step=10), stamps={}))
    play.tell(exited(0, killed=True), exited(1, killed=True))
    assert play.state.committed < 10
    if how == "fail":
        assert not play.conclusion().succeeded
        assert play.conclusion().failures[0].kind is FailureKind.DIVERGED
        return
    assert isinstance(play.latest[-1], Launch)
    assert play.state.drain is None


def test_a_condition_that_is_met_by_what_is_good_ends_a_run_that_then_diverges() -> None:
    """A validation of an earlier checkpoint has met it: nothing would find that again."""
    play = with_rollbacks(Play(2)).launched().training()
    play.tell(Committed(manifest=manifest(4, step=8), stamps={}))
    play.tell(stop_wanted(Stopped(by="condition", reason="val >= 0.9", step=8)))
    play.tell(diverged(1, step=10, good_step=9), exited(0, killed=True), exited(1, killed=True))
    assert play.conclusion().succeeded
    assert play.state.committed == 8


def test_who_interrupts_a_run_that_diverges_has_it_interrupted() -> None:
    play = with_rollbacks(Play(2)).launched().training()
    play.tell(stop_wanted(Stopped(by="signal", reason="SIGTERM")))
    play.tell(diverged(1, step=10, good_step=9), exited(0, killed=True), exited(1, killed=True))
    assert play.conclusion().stopped is not None


def test_of_two_ranks_the_one_whose_reports_were_good_for_less_long_decides() -> None:
    play = with_rollbacks(Play(2)).launched().training()
    play.tell(diverged(0, step=8, good_step=7), diverged(1, step=7, good_step=6, problem="no way"))
    play.tell(exited(0, killed=True), exited(1, killed=True))
    assert play.conclusion().reason == "no way"


def test_each_divergence_has_an_entry_of_its_own() -> None:
    event = diverged(1, step=7, good_step=6)
    found, transitioned = entries_of(event, step(Play(2).launched().training().state, event))
    assert isinstance(found, DivergenceFound)
    assert (found.rank, found.step, found.good_step) == (1, 7, 6)
    lines = [encoded(each) for each in (found, transitioned)]
    assert [line["event"] for line in lines] == ["Diverged", "Failed"]
    assert [type(decoded(line, file="", number=1)) for line in lines] == [
        DivergenceFound,
        Transitioned,
    ]
