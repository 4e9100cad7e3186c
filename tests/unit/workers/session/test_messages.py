"""Messages between trainer and agent: framed, cut anywhere, and understood."""

from __future__ import annotations

import socket
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.parts import PartStaged, StagedPart
from polytrain.events.attempt import Done, Drained, Event, Joined, Offered, Reported
from polytrain.events.notices import PreemptionInfo
from polytrain.policy.placement import NodeAddress, members
from polytrain.workers.agents.calls import Acknowledge, DrainAttempt, Leave, SendRoster, message_of
from polytrain.workers.processes.channel import FrameBuffer, Message, Ring, SocketChannel, pack
from polytrain.workers.session.messages import (
    done_message,
    drained_message,
    joined_message,
    offer_message,
    preemption_of,
    report_message,
    staged_message,
    to_event,
    to_part,
    world_from,
)
from polytrain_plugins import Offer

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(st.lists(plain, min_size=1, max_size=4), max_size=5)


@given(messages=messages, data=st.data())
def test_frames_may_be_cut_anywhere(messages: list[Message], data: st.DataObject) -> None:
    stream = b"".join(pack(message) for message in messages)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    ends = [0, *sorted(cuts), len(stream)]
    buffer, received = FrameBuffer(), []
    for start, stop in pairwise(ends):
        received += buffer.feed(stream[start:stop])
    assert received == messages


def test_a_message_comes_when_its_last_byte_does() -> None:
    buffer, frame = FrameBuffer(), pack(["done"])
    assert [buffer.feed(frame[i : i + 1]) for i in range(len(frame) - 1)] == [[]] * (len(frame) - 1)
    assert buffer.feed(frame[-1:]) == [["done"]]


def over_the_wire(message: Message) -> Message:
    [received] = FrameBuffer().feed(pack(message))
    return received


def heard(message: Message) -> Event:
    return to_event(over_the_wire(message), attempt=2, rank=5)


OFFER = Offer(host="10.0.0.1", port=4242, details={"token": b"\0\xff", "nested": {"a": [1, None]}})


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (offer_message(OFFER), Offered(attempt=2, rank=5, offer=OFFER)),
        (offer_message(Offer()), Offered(attempt=2, rank=5, offer=Offer())),
        (
            joined_message({"train": 3}, device="CPU", node="a"),
            Joined(attempt=2, rank=5, rows={"train": 3}, device="CPU", node="a"),
        ),
        (
            report_message(
                7, {"loss": 0.5, "by class": {"a": [1, 2]}, "none": None}, 0.25, 0.5, at=9.5
            ),
            Reported(
                attempt=2,
                rank=5,
                step=7,
                metrics={"loss": 0.5, "by class": {"a": [1, 2]}, "none": None},
                stalled_s=0.25,
                copied_s=0.5,
                at=9.5,
            ),
        ),
        (
            staged_message(3, "/staging", {}, 40, {}, {}, waits=True),
            PartStaged(attempt=2, rank=5, checkpoint=3, waits=True),
        ),
        (done_message(1.5, 2.5), Done(attempt=2, rank=5, stalled_s=1.5, copied_s=2.5)),
        (drained_message(1.5, 2.5), Drained(attempt=2, rank=5, stalled_s=1.5, copied_s=2.5)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_a_trainer_says_is_what_happens(message: Message, event: Event) -> None:
    assert heard(message) == event


STAGED = staged_message(
    3,
    "/staging/of 3",
    {"model é.pt": [2**40, 2**62 + 1]},
    40,
    {"loss": 1},
    {"train": {"epoch": 1, "position": 10**12}},
    waits=False,
)


def test_a_staged_part_tells_all_that_its_checkpoint_will_say() -> None:
    attempt_id = AttemptId(token=4, attempt=2)
    assert to_part(over_the_wire(STAGED), attempt_id=attempt_id, rank=5) == StagedPart(
        attempt_id=attempt_id,
        rank=5,
        checkpoint=3,
        staged=Path("/staging/of 3"),
        stamps={"model é.pt": [2**40, 2**62 + 1]},
        step=40,
        metrics={"loss": 1},
        positions={"train": {"epoch": 1, "position": 10**12}},
    )


def test_a_trainer_hears_which_checkpoint_is_settled() -> None:
    assert over_the_wire(message_of(Acknowledge(attempt=2, checkpoint=7))) == ["settled", 7]


def test_an_unknown_message_is_an_error() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        to_event(["nonsense", 1], attempt=0, rank=0)


def test_a_roster_becomes_the_world_of_each_rank() -> None:
    offers = (OFFER, Offer(), Offer(host="h", port=1))
    everybody = members([NodeAddress(node_id="n", host="h")] * 3, cpus=2, gpus=0)
    message = over_the_wire(message_of(SendRoster(attempt=4, offers=offers)))
    world = world_from(message, attempt=4, members=everybody, rank=1)
    assert world.attempt == 4
    assert world.offers == offers
    assert world.members == everybody
    assert world.me == everybody[1]
    assert world.leader == OFFER


def test_a_channel_carries_messages_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = SocketChannel(ours), SocketChannel(theirs)
        sender.send(message_of(Leave(attempt=0)))
        sender.send(report_message(1, {"text": "x" * 5000}))
        assert receiver.receive() == ["leave"]
        assert receiver.receive() == [
            "report",
            1,
            {"text": "x" * 5000},
            0.0,
            0.0,
            False,
            0.0,
        ]


def test_no_report_overtakes_one_with_a_checkpoint() -> None:
    """A ring is read whenever there is time, a socket when its reader is woken."""
    ring = Ring(memoryview(bytearray(10_000)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        trainer, agent = SocketChannel(ours), SocketChannel(theirs)
        trainer.gather_reports(ring, calls_every_s=1e9)
        reports = [report_message(step, {}, 0.0) for step in range(4)]
        trainer.send(reports[0])
        trainer.send(reports[1], ["staged"])
        trainer.send(reports[2])
        trainer.send(reports[3], ["staged"])
        assert FrameBuffer().feed(ring.take(received=3)) == reports
        assert [agent.receive() for _ in range(3)] == [["reports"], ["staged"], ["staged"]]
        assert agent.poll() is None


@pytest.mark.parametrize("sent", [b"", pack(["done"])[:3], pack(["done"])[:-1]])
def test_a_line_that_breaks_is_the_end(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(sent)
        ours.close()
        with pytest.raises(EOFError):
            SocketChannel(theirs).receive()


@pytest.mark.parametrize("deadline_ms", [None, 1_800_000_000_000])
def test_a_preemption_arrives_as_it_was_sent(deadline_ms: int | None) -> None:
    preemption = PreemptionInfo(
        deadline_ms=deadline_ms, preempted_node_to_ranks={"node-b": [2, 3], "node-a": [0]}
    )
    received = preemption_of(message_of(DrainAttempt(attempt=0, preemption=preemption)))
    assert received == preemption
    assert received is not None
    assert received.preempted_node_ids == ["node-a", "node-b"]
    assert received.preempted_ranks == [0, 2, 3]
    assert preemption_of(message_of(DrainAttempt(attempt=0))) is None
