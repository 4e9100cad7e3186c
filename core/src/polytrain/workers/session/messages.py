"""The messages between a worker process and its agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import CheckpointsAsked, PartStaged, StagedPart
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    ConditionMet,
    Diverged,
    Done,
    Drained,
    Event,
    ExactnessFound,
    Failed,
    Joined,
    Offered,
    Reported,
    SavesOnRequest,
    StateDigested,
)
from polytrain.events.notices import PreemptionInfo, Rollback, as_skipped
from polytrain.functions.return_values import Returned
from polytrain.workers.processes.channel import Message
from polytrain_plugins import Member, Offer, Stopped, World

if TYPE_CHECKING:
    from polytrain.workers.session.survivor import Place


# From worker process to agent


def offer_message(offer: Offer) -> Message:
    return ["offer", offer.host, offer.port, dict(offer.details)]


def joined_message(rows: Mapping[str, int], *, device: str, node: str) -> Message:
    """Return the message that the rank starts to train; see `Joined`."""
    return ["joined", dict(rows), device, node]


def report_message(
    step: int,
    metrics: Mapping[str, Any],
    stalled_s: float = 0.0,
    copied_s: float = 0.0,
    *,
    has_checkpoint: bool = False,
    at: float = 0.0,
) -> Message:
    """Return the message of a report.

    Args:
        stalled_s: seconds that training has waited for checkpoints.
        copied_s: seconds that it has waited for copies of its state in memory.
        has_checkpoint: whether the rank's part of a checkpoint follows.
        at: time of the report, in seconds since the epoch.
    """
    return ["report", step, dict(metrics), stalled_s, copied_s, has_checkpoint, at]


def digested_message(step: int, digests: Mapping[str, str]) -> Message:
    """Return the message with digests of this rank's state; see `StateDigested`."""
    return ["digested", step, dict(digests)]


def exactness_message(why_not: str) -> Message:
    """Return the message that virtual workers were checked; see `ExactnessFound`."""
    return ["exactness", why_not]


def staged_message(
    checkpoint: int,
    staged: str,
    stamps: Mapping[str, Sequence[int]],
    step: int,
    metrics: Mapping[str, Any],
    positions: Mapping[str, Any],
    *,
    validation: Mapping[str, Any] | None = None,
    waits: bool,
) -> Message:
    """Return the message that a part is complete in this directory; "" if it is already stored."""
    plain = [dict(stamps), step, dict(metrics), dict(positions)]
    return ["staged", checkpoint, staged, *plain, validation, waits]


def done_message(
    stalled_s: float = 0.0, copied_s: float = 0.0, returned: Returned | None = None
) -> Message:
    """Return the message that training has returned, with its return value."""
    value = None if returned is None else [returned.kind, returned.data, returned.why]
    return ["done", stalled_s, copied_s, value]


def keeps_message(kept: int, capacity: int, asking: int, size: int) -> Message:
    """Return the message that the process keeps its state after each step; see `Survivor`.

    Args:
        kept: descriptor of the memory with its small states.
        capacity: maximum bytes of a small state.
        asking: descriptor of the pipe that takes requests.
        size: bytes of the whole state.
    """
    return ["keeps", kept, capacity, asking, size]


def keeps_nothing_message(why: str) -> Message:
    """Return the message that the process can't keep its state, and why."""
    return ["keeps_nothing", why]


def written_message(
    number: int,
    staging: Path,
    place: Place,
    *,
    is_copy: bool,
    reports: Sequence[tuple[int, Mapping[str, Any]]] = (),
) -> Message:
    """Return the message that the state is written as a checkpoint's part in this directory.

    Args:
        number: the checkpoint's number, or the copy's.
        is_copy: whether nobody has asked for it; see `Copies`.
        reports: step and metrics of the reports before.
    """
    tag = "copied" if is_copy else "written"
    plain = [place.step, dict(place.metrics), place.plain_positions(), place.validation]
    flags = [place.is_report, place.is_ahead, place.is_earlier]
    before = [[step, dict(metrics)] for step, metrics in reports]
    return [tag, number, str(staging), {}, *plain, *flags, before]


def uncopied_message(number: int) -> Message:
    """Return the message that a copy is about to be deleted."""
    return ["uncopied", number]


def uncopyable_message(number: int, why: str, *, is_last: bool) -> Message:
    """Return the message that the process can't make a copy; see `CopyRefused`."""
    return ["uncopyable", number, why, is_last]


def unwritten_message(number: int, why: str) -> Message:
    """Return the message that the process has no clean state to write."""
    return ["unwritten", number, why]


def saves_on_request_message() -> Message:
    """Return the message that the training function makes checkpoints on request."""
    return ["saves on request"]


def condition_met_message(stopped: Stopped) -> Message:
    """Return the message that the last report meets a condition; rank 0 then stops by itself."""
    return ["condition met", asdict(stopped)]


def diverged_message(found: Rollback, problem: str) -> Message:
    """Return the message that training diverges by the last report; see `Diverged`."""
    return ["diverged", asdict(found), problem]


def checkpoints_asked_message(number: int, *, validated: bool) -> Message:
    """Return the request for the run's checkpoints; see `CheckpointsAsked`."""
    return ["checkpoints asked", number, validated]


def drained_message(stalled_s: float = 0.0, copied_s: float = 0.0) -> Message:
    """Return the message that the process has stopped after a checkpoint, as requested."""
    return ["drained", stalled_s, copied_s]


def to_part(message: Message, *, attempt_id: AttemptId, rank: int) -> StagedPart:
    """Return the part of a checkpoint that a `staged`, `written` or `copied` message describes."""
    _, checkpoint, staged, stamps, step, metrics, positions, validation, *_ = message
    return StagedPart(
        attempt_id=attempt_id,
        rank=rank,
        checkpoint=checkpoint,
        staged=Path(staged) if staged else None,
        stamps=stamps,
        step=step,
        metrics=metrics,
        positions=positions,
        validation=validation,
    )


def to_event(
    message: Message, *, attempt: int, rank: int
) -> Event | Reported | PartStaged | CheckpointsAsked | StateDigested | ExactnessFound:
    """Return the event of a worker process's message."""
    match message:
        case ["offer", host, port, details]:
            offer = Offer(host=host, port=port, details=details)
            return Offered(attempt=attempt, rank=rank, offer=offer)
        case ["joined", rows, device, node]:
            return Joined(attempt=attempt, rank=rank, rows=rows, device=device, node=node)
        case ["report", step, metrics, stalled_s, copied_s, has_checkpoint, at]:
            return Reported(
                attempt=attempt,
                rank=rank,
                step=step,
                metrics=metrics,
                stalled_s=stalled_s,
                copied_s=copied_s,
                has_checkpoint=has_checkpoint,
                at=at,
            )
        case ["digested", step, digests]:
            return StateDigested(attempt=attempt, rank=rank, step=step, digests=digests)
        case ["exactness", why_not]:
            return ExactnessFound(attempt=attempt, rank=rank, why_not=why_not)
        case ["saves on request"]:
            return SavesOnRequest(attempt=attempt, rank=rank)
        case ["condition met", stopped]:
            return ConditionMet(attempt=attempt, rank=rank, stopped=Stopped(**stopped))
        case ["diverged", found, problem]:
            found["skipped"] = as_skipped(found["skipped"])
            return Diverged(attempt=attempt, found=Rollback(**found), problem=problem)
        case ["staged", checkpoint, *_, waits]:
            return PartStaged(attempt=attempt, rank=rank, checkpoint=checkpoint, waits=waits)
        case ["checkpoints asked", number, validated]:
            return CheckpointsAsked(attempt=attempt, rank=rank, number=number, validated=validated)
        case ["done", stalled_s, copied_s, value]:
            returned = value and Returned(kind=value[0], data=value[1], why=value[2])
            return Done(
                attempt=attempt,
                rank=rank,
                stalled_s=stalled_s,
                copied_s=copied_s,
                returned=returned,
            )
        case ["drained", stalled_s, copied_s]:
            return Drained(attempt=attempt, rank=rank, stalled_s=stalled_s, copied_s=copied_s)
        case ["raised", summary, text, pickled, kind]:
            failure = Failure(
                kind=FailureKind(kind),
                rank=rank,
                message=summary,
                traceback=text,
                error=pickled,
            )
            return Failed(attempt=attempt, failure=failure)
    raise ValueError(f"unknown message {message[:1]}")


# From agent to worker process; `workers.agents.calls.message_of` returns these messages

LEAVE: Message = ["leave"]
END: Message = ["end"]
"""As "drain", and the run ends then by a signal."""


def preemption_of(message: Message) -> PreemptionInfo | None:
    """Return the preemption that is the reason of a "drain" message, if any is."""
    match message:
        case ["drain", deadline_ms, nodes]:
            return PreemptionInfo(deadline_ms=deadline_ms, preempted_node_to_ranks=nodes)
        case _:
            return None


def world_from(
    message: Message,
    *,
    attempt: int,
    members: tuple[Member, ...],
    rank: int,
    virtual_workers: int | None = None,
) -> World:
    """Return the world that a roster describes."""
    offers = tuple(
        Offer(host=host, port=port, details=details) for host, port, details in message[1]
    )
    return World(
        attempt=attempt,
        me=members[rank],
        members=members,
        offers=offers,
        virtual_workers=virtual_workers,
    )
