"""What the state machine remembers of reports and checkpoints, which need no decision."""

from __future__ import annotations

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
from polytrain.run.machine import note

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
