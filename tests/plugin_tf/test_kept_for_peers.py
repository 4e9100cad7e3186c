"""Which state of a fit a survivor writes, and what is in it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf

from polytrain.extension import KeptState, KeptStates, NotCleanError, Place, Survivor
from polytrain_tf import kept_for_peers
from polytrain_tf.kept_for_peers import (
    FitPoint,
    KeptForPeers,
    own_variables,
    read_own,
    write_own,
)
from polytrain_tf.saved import Progress, load_into

FILE = "own.npz"
X, Y = np.ones((8, 3), "float32"), np.zeros((8, 1), "float32")


class Memory:
    """A process's survivor, with the memory that its agent would read."""

    rank = 0

    def __init__(self) -> None:
        self.kept: KeptStates | None = None

    def keep(self, writer: Any, *, capacity: int, size: int) -> KeptStates:
        self.kept = KeptStates.new(capacity)
        return self.kept

    def keep_nothing(self, why: str) -> None:
        self.kept = None

    def states(self) -> tuple[KeptState, ...]:
        assert self.kept is not None
        return self.kept.read()


def network() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile(optimizer="adam", loss="mse")
    return model


def point(step: int, *, is_within: bool = True) -> FitPoint:
    return FitPoint(
        place=Place(step=step, metrics={}, positions={}),
        progress=Progress(epochs=step),
        callbacks={},
        is_within=is_within,
    )


def values(model: Any) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in (*model.variables, *model.optimizer.variables)]


class Trained:
    """A model that has kept its state after each of its steps."""

    def __init__(self, steps: int, *, is_within: bool = True) -> None:
        self.model, self.memory = network(), Memory()
        self.model.train_on_batch(X, Y)
        self.peers = KeptForPeers(self.model, cast(Survivor, self.memory), FILE)
        self.after: dict[int, list[bytes]] = {}
        self.metrics: dict[int, list[Any]] = {}
        for step in range(1, steps + 1):
            self.model.train_on_batch(X, Y)
            self.peers.keep(point(step, is_within=is_within))
            self.after[step] = values(self.model)
            self.metrics[step] = [np.array(each) for each in self.model.metrics_variables]
        # A step whose collective fails has changed some.
        self.model.layers[0].moving_mean.assign([7.0, 7.0, 7.0])
        self.model.layers[1].bias.assign([9.0])

    def written(self, directory: Path, lost: tuple[KeptState, ...]) -> Place:
        held = self.peers.hold(0, lambda: True)
        return self.peers.write({0: self.memory.states(), 1: lost}, held, directory)


@pytest.mark.parametrize("lost_after", [3, 2])
def test_the_newest_step_that_all_ranks_have_ended_is_written(
    tmp_path: Path, lost_after: int
) -> None:
    trained = Trained(3)
    states = tuple(each for each in trained.memory.states() if each.point <= lost_after)
    assert trained.written(tmp_path, states).step == lost_after
    loaded = network()
    loaded.optimizer.build(loaded.trainable_variables)
    load_into(loaded, tmp_path)
    assert values(loaded) == trained.after[lost_after]
    for rank in (0, 1):
        own = read_own(tmp_path / FILE, rank, 2, own_variables(trained.model))
        own = own[-len(trained.metrics[lost_after]) :]
        assert all(map(np.array_equal, own, trained.metrics[lost_after]))


def test_a_survivor_may_have_ended_a_batch_since_its_agent_looked(tmp_path: Path) -> None:
    trained = Trained(3)
    states = trained.memory.states()
    held = trained.peers.hold(0, lambda: True)
    assert trained.peers.write({0: states[:-1], 1: states}, held, tmp_path).step == 3
    assert (tmp_path / FILE).exists()


def test_a_step_that_ends_meanwhile_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(2)
    bias, own_save, saves = trained.model.layers[1].bias, kept_for_peers.save, []

    def save(*arguments: Any) -> None:
        own_save(*arguments)
        saves.append(arguments)
        if len(saves) == 1:
            bias.assign([9.0])

    monkeypatch.setattr(kept_for_peers, "save", save)
    trained.written(tmp_path, trained.memory.states())
    loaded = network()
    loaded.optimizer.build(loaded.trainable_variables)
    load_into(loaded, tmp_path)
    assert values(loaded) == trained.after[2]


def test_without_values_of_the_lost_rank_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(NotCleanError, match="older"):
        Trained(3).written(tmp_path, ())


def test_a_report_needs_no_values_of_the_lost_rank(tmp_path: Path) -> None:
    assert Trained(2, is_within=False).written(tmp_path, ()).step == 2
    assert not (tmp_path / FILE).exists()


def test_an_epoch_that_the_lost_rank_has_reported_is_waited_for() -> None:
    trained = Trained(2)

    def reports() -> bool:
        trained.peers.keep(point(3, is_within=False))
        return True

    assert trained.peers.hold(3, reports) == 3


def test_it_is_not_waited_for_any_longer_than_there_is_time() -> None:
    assert Trained(2).peers.hold(3, lambda: False) == 2


def test_a_step_keeps_its_state_before_other_ranks_get_its_outputs(tmp_path: Path) -> None:
    model, memory = network(), Memory()
    model.train_on_batch(X, Y)
    peers = KeptForPeers(model, cast(Survivor, memory), FILE)
    bias = model.layers[1].bias
    known: list[tuple[KeptState, ...]] = []

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step() -> None:
        bias.assign_add([1.0])
        outputs = peers.with_state_kept({"loss": tf.constant(1.0)}, lambda: point(1))
        tf.py_function(lambda _: known.append(memory.states()), [outputs["loss"]], [])

    before = float(bias.numpy()[0])
    step()
    [states] = known
    assert [each.point for each in states] == [1]
    peers.write({0: states, 1: states}, peers.hold(1, lambda: True), tmp_path)
    loaded = network()
    loaded.optimizer.build(loaded.trainable_variables)
    load_into(loaded, tmp_path)
    assert float(loaded.layers[1].bias.numpy()[0]) == before + 1


def test_a_step_pays_nothing_for_a_state_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_for_peers, "_MOST_OWN", 0)
    peers = KeptForPeers(network(), cast(Survivor, Memory()), FILE)

    @tf.function  # type: ignore[untyped-decorator]  # as above
    def step() -> Any:
        return peers.with_state_kept({"loss": tf.constant(1.0)}, lambda: point(1))

    assert float(step()["loss"]) == 1.0
    graph = step.get_concrete_function().graph
    assert not {each.type for each in graph.get_operations()} & {"ReadVariableOp", "EagerPyFunc"}


class Clock:
    """A clock that moves only when a test moves it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("keeping_s", "every"), [(0.0, 1), (0.002, 1), (0.05, 17)])
def test_keeping_the_state_takes_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, keeping_s: float, every: int
) -> None:
    """Of steps that take 100 ms by themselves, 3 % are 3 ms."""
    clock = Clock()
    monkeypatch.setattr(kept_for_peers, "time", clock)
    monkeypatch.setattr(kept_for_peers, "summing", lambda strategy: list)
    peers = KeptForPeers(network(), cast(Survivor, Memory()), FILE)
    begun: list[int] = []
    kept: list[int] = []

    def slow() -> FitPoint:
        clock.now += keeping_s
        kept.append(begun[-1])
        return point(1)

    @tf.function  # type: ignore[untyped-decorator]  # as above
    def batch() -> Any:
        return peers.with_state_kept(tf.constant(1.0), slow)

    for each in range(1, 81):
        begun.append(each)
        batch()
        clock.now += 0.1
        peers.after_batch(lambda: point(0), is_kept=True)
    later = [each for each in kept if each > 11]
    assert {after - before for before, after in pairwise(later)} == {every}


def test_a_state_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    trained = Trained(1)
    trained.model.layers[1].kernel.assign(np.full((3, 1), np.nan, "float32"))
    for _ in range(2):
        trained.peers.keep(point(2))
    with pytest.raises(NotCleanError, match="finite"):
        trained.written(tmp_path, trained.memory.states())


class Rivals(keras.Model):  # type: ignore[misc]  # keras has no types
    """Two layers that a step of its own trains, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rivals = [keras.layers.Dense(1), keras.layers.Dense(1)]
        for each in self.rivals:
            each.build((None, 3))
        self.optimizers = [keras.optimizers.Adam(0.1) for _ in self.rivals]

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        for layer, optimizer in zip(self.rivals, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((layer(x) - y - 1.0) ** 2)
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def rivals() -> tuple[Any, Memory, KeptForPeers]:
    model, memory = Rivals(), Memory()
    model.compile(optimizer=None)
    model.train_on_batch(X, Y)
    peers = KeptForPeers(model, cast(Survivor, memory), FILE)
    peers.keep(point(1))
    return model, memory, peers


def test_the_state_of_each_optimizer_is_that_of_the_step(tmp_path: Path) -> None:
    model, memory, peers = rivals()
    expected = [np.asarray(each) for each in model.optimizers[1].variables]
    # A step whose collective fails has changed some.
    model.optimizers[1].variables[-1].assign([9.0])
    peers.write({0: memory.states()}, peers.hold(0, lambda: True), tmp_path)
    loaded = Rivals()
    loaded.compile(optimizer=None)
    load_into(loaded, tmp_path)
    assert all(map(np.array_equal, loaded.optimizers[1].variables, expected))


def test_nothing_is_written_once_an_optimizer_was_replaced(tmp_path: Path) -> None:
    model, memory, peers = rivals()
    model.optimizers[0] = keras.optimizers.SGD(0.1)
    with pytest.raises(NotCleanError, match="replaced"):
        peers.write({0: memory.states()}, peers.hold(0, lambda: True), tmp_path)


def variables(*ways: str) -> list[Any]:
    return [
        keras.Variable(0.0, aggregation=way, synchronization="on_read" if way == "sum" else "auto")
        for way in ways
    ]


@pytest.mark.parametrize(
    ("ranks", "statistics", "sums"),
    [(1, [1.0], [30.0]), (2, [1.0, 2.0], [10.0, 20.0]), (3, [1.0, 2.0, 1.0], [30.0, 0.0, 0.0])],
)
def test_all_ranks_together_have_the_sums_of_those_before(
    tmp_path: Path, ranks: int, statistics: list[float], sums: list[float]
) -> None:
    """TensorFlow adds metrics up on reading: a sum may be counted once only."""
    own = {0: [np.array(1.0), np.array(10.0)], 1: [np.array(2.0), np.array(20.0)]}
    write_own(tmp_path / FILE, own)
    found = [
        read_own(tmp_path / FILE, rank, ranks, variables("none", "sum")) for rank in range(ranks)
    ]
    assert [[float(each) for each in some] for some in zip(*found, strict=True)] == [
        statistics,
        sums,
    ]


def test_a_model_may_have_no_values_that_differ_by_rank(tmp_path: Path) -> None:
    write_own(tmp_path / FILE, {0: [], 1: []})
    assert read_own(tmp_path / FILE, 1, 2, []) == []
