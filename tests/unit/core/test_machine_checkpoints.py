"""What the state machine makes of checkpoints: they count whatever has become of their trainers."""

from __future__ import annotations

import pytest
from tests.unit.core.checkpoints import manifest
from tests.unit.core.play import Play, exited

from polytrain.checkpoint.events import Committed, PartStaged, PartStored, PartVoid
from polytrain.common.events import Event
from polytrain.run.actions import Action, AddCheckpoint, AddPart, CountPart, DropCheckpoint


def part(rank: int, attempt: int = 0) -> PartStored:
    return PartStored(
        attempt=attempt, rank=rank, checkpoint=0, step=1, metrics={}, positions={}, files=()
    )


VOID = PartVoid(attempt=0, rank=1, checkpoint=4, reason="'model' was written to")
COMMITTED = Committed(manifest=manifest(4), stamps={})


def test_a_part_of_a_checkpoint_counts_whenever_it_was_stored() -> None:
    play = Play(2, max_failures=1).launched().training()
    assert play.tell(part(0)).latest == (AddPart(part=part(0)),)
    assert play.tell(exited(1, killed=False), part(1)).latest == (AddPart(part=part(1)),)
    play.tell(exited(0, killed=True)).training()
    assert play.state.attempt == 1
    assert play.tell(part(0)).latest == (AddPart(part=part(0)),)


@pytest.mark.parametrize(
    ("event", "action"),
    [
        (VOID, DropCheckpoint(part=VOID)),
        (COMMITTED, AddCheckpoint(committed=COMMITTED)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_become_of_a_checkpoint_counts_whenever_it_is_told(
    event: Event, action: Action
) -> None:
    """The files and the manifest outlive the trainers that they are of."""
    play = Play(2, max_failures=1).launched().training()
    assert play.tell(event).latest == (action,)
    assert play.tell(exited(0, killed=False), event).latest == (action,)
    play.tell(exited(1, killed=True)).training()
    assert play.state.attempt == 1
    assert play.tell(event).latest == (action,)
    assert play.leaving().tell(event).latest == (action,)
    assert "checkpoint" in play.reason


def test_a_part_that_is_handed_in_is_counted() -> None:
    part_staged = PartStaged(attempt=0, rank=1, checkpoint=4, waits=False)
    play = Play(2).launched().training().tell(part_staged)
    assert play.latest == (CountPart(part=part_staged),)


def test_a_void_checkpoint_is_told_with_its_rank_and_reason() -> None:
    reason = Play(2).launched().training().tell(VOID).reason
    assert "checkpoint 4 is void" in reason
    assert "rank 1" in reason
    assert VOID.reason in reason
