"""What ranks have alone lies on another host, after each forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plugin_torch.test_keeper import Rank, Within
from tests.plugin_torch.test_keeper import World as SizeOf

from polytrain.extension import KeptState, NotCleanError
from polytrain.testing.processes import eventually
from polytrain_plugins import Member, Offer, World
from polytrain_torch.backend import Torch
from polytrain_torch.engine import TorchEngine
from polytrain_torch.scripts.engine import ScriptEngine
from polytrain_torch.survivors import keeper, point_writer
from polytrain_torch.survivors.depot import (
    Depot,
    State,
    key_details,
    packed,
    second_store,
    serves_second,
    store_of,
    unpacked,
)

_SOON = timedelta(seconds=10)


def member(rank: int, node: int, local: int = 0, *, gpus: int = 0) -> Member:
    return Member(
        rank=rank,
        world_size=3,
        local_rank=local,
        local_world_size=1,
        node_rank=node,
        node_count=2,
        host="127.0.0.1",
        cpus=1,
        gpus=gpus,
    )


class Hosts:
    """The ranks of two hosts, and both stores."""

    def __init__(self, nodes: Sequence[int] = (0, 0, 1)) -> None:
        locals_ = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
        self.members = tuple(
            member(rank, node, local)
            for rank, (node, local) in enumerate(zip(nodes, locals_, strict=True))
        )
        key = key_details()
        self.stores = [second_store(self.members[at], _SOON) for at in (0, -1)]
        leader, second = (
            Offer(host="127.0.0.1", port=None if each is None else each[1], details=key)
            for each in self.stores
        )
        self.offers = (leader, *(Offer() for _ in nodes[2:]), second)

    def world(self, rank: int) -> World:
        me = self.members[rank]
        return World(attempt=0, me=me, members=self.members, offers=self.offers)

    def depot(self, rank: int) -> Depot:
        return Depot(self.world(rank), _SOON)

    def lose(self, host: int) -> None:
        self.stores[host] = None


def state(point: int, content: bytes = b"", *, forecast: bool = False) -> KeptState:
    return KeptState(point=point, is_forecast=forecast, content=content)


def lay(depot: Depot, state: KeptState, alone: bytes) -> None:
    pieces = [state.content]
    depot.put(state.point, pieces, is_forecast=state.is_forecast, alone=[alone])


def test_each_rank_lays_its_states_down_on_another_host() -> None:
    hosts = Hosts()
    assert [serves_second(each) for each in hosts.members] == [False, False, True]
    stores = [store_of(rank, hosts.world(0)) for rank in range(3)]
    assert stores == [hosts.offers[2], hosts.offers[2], hosts.offers[0]]


def test_ranks_with_gpus_have_no_second_store() -> None:
    assert not serves_second(member(1, 1, gpus=1))


@pytest.mark.parametrize(("engine", "listens"), [(TorchEngine, True), (ScriptEngine, False)])
def test_ranks_of_scripts_have_no_second_store(engine: type[TorchEngine], listens: bool) -> None:
    with engine(Torch()).offering(member(1, 1)) as offer:
        assert (offer.port is not None) == listens


def test_a_forecast_is_sent_with_the_state_before_it() -> None:
    hosts = Hosts()
    lost, left = hosts.depot(2), hosts.depot(0)
    assert not left.read(2)
    for point in range(1, 9):
        lay(lost, state(point, b"clean"), b"own %d" % point)
        lay(lost, state(point + 1, b"forecast", forecast=True), b"own %d" % (point + 1))
    last = [state(8, b"clean"), state(9, b"forecast", forecast=True)]
    # Another connection may be served first.
    assert eventually(lambda: left.read(2)[-2:] == last, 10)


def test_a_state_that_was_not_foretold_is_sent_at_once() -> None:
    hosts = Hosts()
    lost, left = hosts.depot(1), hosts.depot(2)
    lay(lost, state(1, forecast=True), b"own")
    lay(lost, state(1, b"as foretold"), b"own")
    lay(lost, state(1, b"another"), b"drawn since")
    sent = [state(1, forecast=True), state(1, b"another")]
    assert eventually(lambda: left.read(1) == sent, 10)


def test_what_lay_on_a_lost_host_is_not_there() -> None:
    hosts = Hosts()
    both = hosts.depot(0), hosts.depot(2)
    for each in both:
        lay(each, state(1), b"")
    hosts.lose(1)
    assert eventually(lambda: both[1].read(2) == [state(1)], 10)
    assert both[1].read(0) == []
    # The training continues until it learns of the loss.
    lay(both[0], state(2), b"more")


def test_what_seldom_changes_is_not_sent_again() -> None:
    hosts = Hosts()
    lost, left = hosts.depot(2), hosts.depot(0)
    # The sixth state has drawn from Python's generator, the eighth from NumPy's.
    python, numpy = [b"p"] * 5 + [b"q"] * 4, [b"n"] * 7 + [b"m"] * 2
    states = [
        [b"lengths", b"torch %d" % at, bytes(9999) + numpy[at], python[at], b"", b"views"]
        for at in range(9)
    ]
    for at, pieces in enumerate(states):
        lost.put(at, pieces, is_forecast=False, alone=[b"%d" % at])
    last = [state(at, b"".join(states[at])) for at in (5, 6, 7, 8)]
    assert eventually(lambda: left.read(2) == last, 10)


def test_a_piece_that_the_state_before_has_is_not_sent_again() -> None:
    clean, forecast = (1, False, [b"own", bytes(999)]), (2, True, [b"drawn", bytes(999)])
    one, both = (packed(bytes(32), "kept", 3, states) for states in ([clean], [clean, forecast]))
    assert len(both) < len(one) + 99
    assert unpacked(bytes(32), "kept", both, {0: ()}) == (3, [clean, forecast])


@given(
    st.lists(st.tuples(st.integers(0, 2**63), st.booleans(), st.lists(st.binary()))),
    st.lists(st.binary()),
    st.integers(0),
    st.integers(0, 255),
)
def test_a_message_is_read_as_it_was_sent_or_not_at_all(
    states: list[State], known: list[bytes], at: int, other: int
) -> None:
    key, bases = bytes(32), {0: (), 7: known}
    message = packed(key, "kept 1 3", 3, states, base=7, known=known)
    assert unpacked(key, "kept 1 3", message, bases) == (3, states)
    assert unpacked(bytes([1] * 32), "kept 1 3", message, bases) is None
    # Nor is it taken for another rank's.
    assert unpacked(key, "kept 2 3", message, bases) is None
    assert unpacked(key, "kept 1 3", message, {0: ()}) is None
    for cut in (0, 5, len(message) - 1):
        assert unpacked(key, "kept 1 3", message[:cut], bases) is None
    damaged = bytearray(message)
    damaged[at % len(message)] = other
    read = unpacked(key, "kept 1 3", bytes(damaged), bases)
    assert (read is None) == (bytes(damaged) != message)


def test_a_large_state_is_not_sent() -> None:
    hosts = Hosts()
    lay(hosts.depot(2), state(1, bytes(2 << 20)), b"")
    assert not hosts.depot(0).read(2)


@pytest.fixture
def within(run: Callable[..., Any]) -> Within:
    """Run a function as a training function of one worker."""
    return lambda function: run(function)


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_survivor_writes_what_the_rank_of_a_lost_host_had(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_sent: bool
) -> None:
    """It has computed its gradients, and others their next step; its agent doesn't answer."""

    def on(hosts: Hosts, rank: int) -> Rank:
        its = hosts.depot(rank) if is_sent else None
        monkeypatch.setattr(keeper, "depot", lambda: its)
        return Rank(monkeypatch)

    def train() -> None:
        hosts = Hosts(nodes=(0, 1))
        lost = on(hosts, 1)
        lost.forward(offset=1.0)
        rank = on(hosts, 0)
        rank.step()
        rank.report()
        monkeypatch.setattr(point_writer, "get_context", lambda: SizeOf(2))
        if not is_sent:
            with pytest.raises(NotCleanError, match="rank 1 was lost"):
                rank.write(tmp_path)
            return
        rank.write(tmp_path)
        states = torch.load(tmp_path / "own-1.pt")["parts"]["model"]
        name = "1.running_mean"
        assert torch.equal(states[name], lost.model.state_dict()[name])

    within(train)
