"""What a rank that is left writes, and when it refuses to."""

from __future__ import annotations

import gc
import pickle
import random
import sys
import threading
import weakref
from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import FrameType, MethodType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.plugin_torch.kept_ranks import Session, small_state
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from polytrain.extension import KeptState, NotCleanError, Place
from polytrain_torch import prepare_data_loader, prepare_model
from polytrain_torch.randomness import file_of, generators_of, generators_within
from polytrain_torch.survivors import (
    clean_points,
    keeper,
    live_parts,
    point_writer,
    points,
    unused_gradients,
)
from polytrain_torch.survivors.keeper import Keeper
from polytrain_torch.survivors.kept_by_rank import LENGTHS, KeptByRank
from polytrain_torch.survivors.live_parts import LiveParts
from polytrain_torch.survivors.loop_variables import Loop, frames_from
from polytrain_torch.survivors.snapshots import Snapshot
from polytrain_torch.survivors.unused_gradients import UnusedGradients

Run = Callable[..., Any]


class World:
    """The context of a rank of `size`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_world_size(self) -> int:
        return self.size

    def get_world_rank(self) -> int:
        return 0


class Rank:
    """Trains a small network, and tells its keeper of it as hooks and loaders do."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, fetches: bool = True, **parts: Any
    ) -> None:
        torch.manual_seed(1)
        self.session = Session()
        monkeypatch.setattr(keeper, "survivor", lambda: self.session)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        self.model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.model.register_buffer("calls", torch.zeros(1), persistent=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        known = {"model": self.model, "optimizer": self.optimizer, **parts}
        self.keeper = Keeper(known, {}, around=[self])
        if fetches:
            self.keeper.before_batch(sys._getframe(1))

    def fetch(self) -> None:
        """Have the caller fetch a batch."""
        self.fetch_for(sys._getframe(1))

    def fetch_for(self, loop: FrameType) -> None:
        self.keeper.before_batch(loop)

    def forward(self, offset: float = 0.0) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.arange(8.0).reshape(4, 2) + offset)
        self.keeper.after_forward()
        return found

    def backward(self) -> None:
        self.keeper.before_backward()
        self.forward().square().sum().backward()

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer take its step."""
        self.keeper.before_step(optimizer)
        optimizer.step()
        self.keeper.after_step(optimizer)

    def step(self) -> None:
        self.backward()
        self.take(self.optimizer)

    def report(self) -> None:
        self.keeper.at_report({"loss": 1.0}, {"epoch": 1})

    def states(self) -> tuple[Any, ...]:
        assert self.session.kept is not None
        return self.session.kept.read()

    def write(self, directory: Path, lost: Rank | None = None) -> Place:
        """Write the state at this one's point. It is rank 0, and the lost one rank 1."""
        point = self.session.writer.hold(0, lambda: False)
        kept = {0: self.states(), 1: () if lost is None else lost.states()}
        return self.session.writer.write(kept, point, directory)


@pytest.fixture
def within(run: Run) -> Callable[[Callable[[], None]], None]:
    """Run a function as a training function of one worker."""
    return lambda function: run(function)


Within = Callable[[Callable[[], None]], None]


def test_a_state_is_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        rank = Rank(monkeypatch)
        rank.step()
        rank.report()
        rank.write(tmp_path)

    within(train)
    assert torch.load(tmp_path / "state.pt")["progress"] == {"epoch": 1}
    # A mask's values aren't finite from the start.
    assert torch.load(tmp_path / "model.pt")["mask"].tolist() == [0, -torch.inf]


def test_what_a_trainer_adds_up_between_two_logs_may_grow(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TRL's have a dozen numbers of each batch, and may log once in hundreds of steps."""

    def train() -> None:
        rank = Rank(monkeypatch)
        for batches in (1, 5000):
            rank.step()
            sums = {f"metric {number}": [0.1] * batches for number in range(12)}
            rank.keeper.at_end_of_step(None, {"sums": sums})
        rank.write(tmp_path)

    within(train)
    assert (tmp_path / "state.pt").exists()


def test_a_report_within_an_accumulation_is_no_point(
    within: Within,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The gradients so far would be lost: what is kept is the state before them."""

    def train() -> None:
        rank = Rank(monkeypatch)
        rank.step()
        rank.optimizer.zero_grad()
        rank.keeper.at_report({"loss": 1.0}, {"batch": 1})
        for batch in (2, 3):
            rank.backward()
            rank.keeper.at_report({"loss": 1.0}, {"batch": batch})
        rank.write(tmp_path)

    within(train)
    assert torch.load(tmp_path / "state.pt")["progress"] == {"batch": 1}
    assert [each.message for each in caplog.records].count(
        "A report comes between backward() and the optimizer's step: its checkpoint doesn't have "
        "the gradients so far, and a restart from it loses them. Report after the step, once for "
        "all batches whose gradients it adds up."
    ) == 1


@pytest.mark.parametrize("where", ["one steps later", "another steps for every second batch"])
def test_gradients_that_the_next_step_is_to_use_are_not_left_out(
    within: Within, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A restart would begin with the next batch."""

    def train() -> None:
        other = torch.nn.Linear(2, 1)
        seldom = torch.optim.SGD(other.parameters(), lr=0.1)
        parts = {"other": other, "seldom": seldom} if where.startswith("another") else {}
        rank = Rank(monkeypatch, fetches=False, **parts)
        for batch in range(6):
            rank.fetch()
            if batch == 5:
                break
            if not parts:
                if batch:
                    rank.take(rank.optimizer)
                    rank.optimizer.zero_grad()
                rank.backward()
                continue
            other(torch.ones(2)).sum().backward()
            rank.step()
            if batch % 2:
                rank.take(seldom)
                seldom.zero_grad()
        with pytest.raises(NotCleanError, match="gradients that its next step was to use"):
            rank.session.writer.hold(0, lambda: False)

    within(train)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("steps", "then"),
    [(3, "drops"), (4, "drops"), (3, "adds again"), (3, "adds in a graph")],
)
def test_gradients_that_a_loop_drops_before_its_next_step_are_used_by_none(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int, then: str
) -> None:
    """It drops those of both optimizers, and has one of them step. What it adds again counts.

    In a graph, autograd makes a new tensor for the sum.
    """
    in_graph, drops = then == "adds in a graph", then == "drops"
    added: list[torch.Tensor] = []

    def train() -> None:
        other = torch.nn.Linear(2, 3)
        its = torch.optim.SGD(other.parameters(), lr=0.1)
        rank = Rank(monkeypatch, fetches=False, other=other, its=its)
        while True:
            rank.fetch()
            if then == "adds again":
                added[:] = [each.grad for each in other.parameters() if each.grad is not None]
            rank.optimizer.zero_grad()
            if not in_graph:
                its.zero_grad()
            rank.keeper.before_backward()
            other(rank.forward()[:, :2]).sum().backward(create_graph=in_graph)
            for parameter, earlier in zip(other.parameters(), added, strict=False):
                assert parameter.grad is not None
                parameter.grad.add_(earlier)
            if rank.keeper.steps == steps:
                break
            rank.take(its if rank.keeper.steps % 2 else rank.optimizer)
        if drops:
            rank.write(tmp_path)
        else:
            with pytest.raises(NotCleanError, match="gradients that its next step was to use"):
                rank.session.writer.hold(0, lambda: False)

    within(train)
    assert (tmp_path / "state.pt").exists() == drops


def test_a_discriminator_that_has_gradients_of_the_generators_loss_is_kept(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its next step doesn't use them."""

    def train() -> None:
        critic = torch.nn.Linear(3, 1)
        its = torch.optim.SGD(critic.parameters(), lr=0.1)
        rank = Rank(monkeypatch, fetches=False, critic=critic, its=its)
        while True:
            rank.fetch()
            if rank.keeper.steps == 4:
                break
            its.zero_grad()
            rank.keeper.before_backward()
            critic(rank.forward().detach()).sum().backward()
            rank.take(its)
            rank.optimizer.zero_grad()
            rank.keeper.before_backward()
            critic(rank.forward()).sum().backward()
            rank.take(rank.optimizer)
        rank.write(tmp_path)

    within(train)
    assert (tmp_path / "state.pt").exists()


def test_two_optimizers_of_the_same_parameters_use_the_same_gradients(
    within: Within,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train() -> None:
        model = torch.nn.Linear(2, 3)
        later = torch.optim.SGD(model.parameters(), lr=0.1)
        first = torch.optim.Adam(model.parameters())
        rank = Rank(monkeypatch, fetches=False, net=model, first=first, later=later)
        while True:
            rank.fetch()
            if rank.keeper.steps == 5:
                break
            optimizer = first if rank.keeper.steps < 3 else later
            optimizer.zero_grad()
            rank.keeper.before_backward()
            model(rank.forward()[:, :2].detach()).sum().backward()
            rank.take(optimizer)
            rank.report()
        rank.write(tmp_path)

    within(train)
    assert (tmp_path / "state.pt").exists()
    assert not caplog.records


class Net:
    """A model with an optimizer, whose gradients another backward pass may leave as they are."""

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        self.gradients = UnusedGradients([self.optimizer])

    def backward(self, *, scale: float = 1.0) -> None:
        self.gradients.computed()
        (self.layer(torch.ones(1, 2)) * scale).sum().backward()

    def backward_elsewhere(self) -> None:
        self.gradients.computed()
        torch.ones(2, requires_grad=True).sum().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.gradients.used_by(self.optimizer)


def test_a_backward_pass_of_another_model_leaves_no_gradients_to_use() -> None:
    """Such as an evaluation's for saliency, with gradients that are zeroed before the next one."""
    net = Net()
    for _ in range(2):
        net.backward()
        net.step()
        net.backward_elsewhere()
        assert not net.gradients.exist()
        net.backward()
        assert net.gradients.exist()
        net.step()
        net.optimizer.zero_grad()
        net.backward()
        net.backward_elsewhere()
        assert net.gradients.exist()
        net.step()


def test_what_is_added_to_a_shards_gradients_waits_for_a_step(within: Within) -> None:
    """The gradients of FSDP's shards stay the same objects, with the same version."""

    def train() -> None:
        net = Net()
        fully_shard(net.layer, mesh=init_device_mesh("cpu", (1,)))
        net.optimizer = torch.optim.SGD(net.layer.parameters(), lr=0.1)
        net.gradients = UnusedGradients([net.optimizer])
        net.backward()
        net.step()
        net.backward_elsewhere()
        assert not net.gradients.exist()
        net.step()
        net.backward()
        assert net.gradients.exist()

    within(train)


@pytest.mark.parametrize("averages_in", [None, torch.float64])
def test_gradients_that_fsdp_has_not_averaged_yet_wait_for_a_step(
    run: Run, averages_in: torch.dtype | None
) -> None:
    """It has them beside the parameters, in the type in which it is to average them."""

    def train() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        policy = MixedPrecisionPolicy(reduce_dtype=averages_in)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keeps = Keeper({"model": model, "optimizer": optimizer}, {})
        for averages in (False, True):
            assert keeps.lacks_gradients() is averages
            model.set_requires_gradient_sync(averages)
            keeps.before_backward()
            model(torch.ones(1, 2)).sum().backward()
            assert keeps.lacks_gradients()
            assert keeps.gradients.dropped_later()() is False
        optimizer.step()
        keeps.after_step(optimizer)
        optimizer.zero_grad()
        assert not keeps.lacks_gradients()

    run(train)


def test_gradients_are_read_only_where_infinite_ones_may_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU that waits for it: a loop that fetches before each step must not."""
    net = Net()
    net.backward(scale=torch.inf)
    assert not net.gradients.exist()
    monkeypatch.delattr(torch, "isfinite")
    assert net.gradients.exist(reads_values=False)


@pytest.mark.parametrize("what", ["a step", "only its gradients"])
def test_what_a_cuda_graph_has_captured_is_refused(
    within: Within, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Neither is seen when the graph is replayed: no more are what an optimizer uses later."""

    def train() -> None:
        rank = Rank(monkeypatch)
        rank.step()
        rank.report()
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_initialized", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            # An event of a GPU's queue would be in the graph.
            capturing.setattr(rank.keeper._points, "leave", Mock(side_effect=AssertionError))
            if what == "a step":
                rank.take(rank.optimizer)
            else:
                rank.keeper.before_backward()
        rank.report()
        with pytest.raises(NotCleanError, match="CUDA graph has captured a step"):
            rank.session.writer.hold(0, lambda: False)

    within(train)


def test_the_training_continues_if_its_gradients_cannot_be_looked_at(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every dtype can tell whether its values are finite."""

    def train() -> None:
        rank = Rank(monkeypatch)
        rank.step()
        monkeypatch.setattr(unused_gradients, "_parameters", Mock(side_effect=TypeError("float1")))
        rank.keeper.before_backward()
        rank.fetch()
        rank.report()
        with pytest.raises(NotCleanError, match="float1"):
            rank.session.writer.hold(0, lambda: False)

    within(train)


def test_a_state_is_kept_after_an_evaluation_within_an_epoch(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loader(rank: Rank) -> Iterator[int]:
        for batch in range(2):
            rank.fetch_for(sys._getframe(1))
            yield batch

    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)
        while True:
            rank.fetch()
            if rank.keeper.steps == 3:
                break
            rank.step()
            for _ in loader(rank):
                with pytest.raises(NotCleanError, match="batches in several places"):
                    rank.session.writer.hold(0, lambda: False)
        rank.write(tmp_path)

    within(train)
    assert (tmp_path / "state.pt").exists()


def test_an_evaluation_before_a_step_ends_no_epoch_of_the_loop(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end says nothing of what the rest of the loop reads, such as a hidden state."""

    def loader(rank: Rank) -> Iterator[None]:
        for _ in range(5):
            rank.fetch_for(sys._getframe(1))
            yield
        rank.fetch_for(sys._getframe(1))
        rank.keeper.epoch_is_over()

    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)
        hidden = torch.zeros(1)
        for _ in loader(rank):
            if rank.keeper.steps == 3:
                for _ in loader(rank):
                    pass
                with pytest.raises(NotCleanError, match="'hidden' changes from step to step"):
                    rank.session.writer.hold(0, lambda: False)
                return
            rank.step()
            hidden = hidden + 1

    within(train)


def test_what_alternates_from_step_to_step_is_carried(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the fourth batch it is what it was at the first step."""

    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)
        is_even = True
        while True:
            rank.fetch()
            if rank.keeper.steps == 3:
                break
            is_even = not is_even
            rank.step()
        assert not is_even
        with pytest.raises(NotCleanError, match="'is_even' changes from step to step"):
            rank.write(tmp_path)

    within(train)


class Stateful(torch.nn.Module):
    """Has what stateful modules of users have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.best, self.temperature = float("nan"), 1.0
        self.hidden, self.seen, self.numbers = torch.zeros(2), [0], random.Random(0)
        self.constants = {"sizes": [2, 3], "zeros": torch.zeros(2)}
        self.pruned_orig = torch.nn.Parameter(torch.zeros(2))
        self.variable = ContextVar("variable", default=0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight


class Abstract(Stateful, ABC):
    """A class that FSDP makes of this one has the name of another module than torch's."""


class Counting(torch.optim.SGD):
    count = 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("part.temperature *= 0.9", "'temperature' of a Stateful"),
        ("part.hidden = part.hidden + 1", "'hidden' of a Stateful"),
        ("part.seen.append(1)", "'seen' of a Stateful"),
        ("part.numbers.random()", "'numbers' of a Stateful"),
        ("part.map = part.weight + torch.rand(2)", "'map' of a Stateful"),
        # The loop, or another module, may use it in the next step.
        ("part.loss = part.weight.sum() + torch.rand(())", "'loss' of a Stateful"),
        ("model.temperature *= 0.9", "'temperature' of a Sequential"),
        ("optimizer.count += 1", "'count' of a Counting"),
        # What each forward pass makes anew carries nothing.
        ("part.pruned = part.pruned_orig * torch.rand(2)", ""),
        ("part.loss = part.weight.sum() + torch.rand(()); del part.loss", ""),
        ("part.variable.set(1)", ""),
        ("part.constants = {'sizes': [2, 3], 'zeros': torch.zeros(2)}", ""),
    ],
)
def test_an_attribute_that_no_checkpoint_has_is_carried(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: str, named: str
) -> None:
    def train() -> None:
        part = Stateful()
        optimizer = Counting(part.parameters())
        rank = Rank(monkeypatch, fetches=False, part=part, other=optimizer)
        rank.model.best, rank.model.temperature = float("nan"), 1.0
        given = {"part": part, "optimizer": optimizer, "model": rank.model, "torch": torch}
        while True:
            rank.fetch()
            if rank.keeper.steps == 3:
                break
            exec(changes, given)
            rank.step()
        if not named:
            rank.write(tmp_path)
            return
        with pytest.raises(NotCleanError, match=f"{named} changes from step to step"):
            rank.write(tmp_path)

    within(train)


@pytest.mark.parametrize("kind", [Stateful, Abstract])
def test_a_sharded_models_own_attributes_are_looked_at(
    within: Within, kind: type[Stateful]
) -> None:
    """FSDP's aren't: memory that a look reads through NumPy can't be resized any more."""

    def train() -> None:
        model: Any = prepare_model(kind(), parallel_strategy="fsdp")

        def step() -> None:
            model(torch.ones(1)).sum().backward()

        step()
        at = frames_from(sys._getframe())[:1]
        loop = Loop(at, [*model.modules()])
        step()
        assert loop.carried(at, {}, has_batch=True) is None
        model.seen.append(1)
        assert f"'seen' of a {kind.__name__} changes" in str(loop.carried(at, {}, has_batch=True))

    within(train)


def test_what_an_attribute_is_compared_by_is_not_kept_alive() -> None:
    """Nor can another one take its place."""
    # A tensor without values stands for one on a GPU.
    values = [torch.empty(2, device="meta"), torch.empty(2, device="meta")]
    seen = Snapshot((), ())
    references = [seen.add(each) for each in values]
    seen.take()
    gone = weakref.ref(values.pop(0))
    assert gone() is None
    now = Snapshot((), ())
    kept, new = now.add(values[0]), now.add(torch.empty(2, device="meta"))
    now.take()
    assert seen.equals(references[1], now, kept)
    assert not seen.equals(references[0], now, new)


class Noisy:
    """Draws from a generator that no checkpoint has."""

    def __init__(self) -> None:
        self.transforms = [torch.nn.Identity(), Noise()]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.tensor(self.transforms[1]())


class Noise:
    def __init__(self) -> None:
        self.numbers = np.random.default_rng(0)

    def __call__(self) -> float:
        return self.numbers.normal()


def test_a_data_set_that_draws_from_its_own_generator_is_noticed(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        data: Any = Noisy()
        batches = iter(prepare_data_loader(DataLoader(data)))
        rank = Rank(monkeypatch, fetches=False)
        while True:
            rank.fetch()
            if rank.keeper.steps == 2:
                break
            next(batches)
            rank.step()
        with pytest.raises(NotCleanError, match="data set draws from a generator of its own"):
            rank.write(tmp_path)

    within(train)


def test_the_generators_of_modules_are_no_data_sets_own() -> None:
    """Checkpoints have them; the operating system's has no state."""

    class Data:
        def __init__(self) -> None:
            self.modules = [random, np.random, torch.nn.functional]
            self.chosen = np.random.mtrand._rand, random._inst, torch.default_generator
            self.system = random.SystemRandom()
            self.own = random.Random(1)

    data = Data()
    assert [*generators_within(data)] == [data.own]
    assert generators_of(data) == [data.own]


def test_a_group_that_was_added_after_the_report_whose_progress_a_restart_gets_is_not_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It adds the groups that it had then, and couldn't restore another one."""

    def train() -> None:
        other = torch.nn.Linear(2, 1)
        rank = Rank(monkeypatch, fetches=False, other=other)
        while True:
            rank.fetch()
            if rank.keeper.steps == 3:
                break
            if rank.keeper.steps == 2:
                rank.report()
                rank.optimizer.add_param_group({"params": other.parameters()})
            rank.step()
        with pytest.raises(NotCleanError, match="groups have changed since the last"):
            rank.write(tmp_path)
        rank.report()
        rank.write(tmp_path)

    within(train)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rank: rank.model[0].weight.data.fill_(torch.nan),
        lambda rank: rank.model[1].running_mean.fill_(torch.inf),
        lambda rank: rank.model.mask.fill_(torch.nan),
        lambda rank: rank.optimizer.state[rank.model[0].weight]["exp_avg"].fill_(torch.inf),
        lambda rank: rank.optimizer.state[rank.model[0].weight]["exp_avg"][0].copy_(
            torch.tensor([torch.inf, -torch.inf])
        ),
    ],
)
def test_a_state_that_is_not_finite_is_not_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoil: Callable[[Rank], None]
) -> None:
    def train() -> None:
        rank = Rank(monkeypatch)
        rank.step()
        spoil(rank)
        rank.report()
        with pytest.raises(NotCleanError, match="isn't finite"):
            rank.write(tmp_path)

    within(train)
    assert not [*tmp_path.glob("*.pt")]


def test_a_state_whose_sum_is_not_finite_or_not_known_is_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        rank = Rank(monkeypatch)
        rank.step()
        state = rank.optimizer.state[rank.model[0].weight]
        state["exp_avg"].fill_(3e38)
        state["scale"] = torch.ones(3, dtype=torch.float8_e5m2)
        rank.report()
        rank.write(tmp_path)

    within(train)


def test_a_buffer_that_is_in_no_checkpoint_must_not_change(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        rank = Rank(monkeypatch)
        rank.step()
        rank.model.get_buffer("calls").add_(1)
        rank.report()
        with pytest.raises(NotCleanError, match=r"a buffer with persistent=False.* changes or"):
            rank.write(tmp_path)

    within(train)


@pytest.mark.parametrize("where", ["report", "end of epoch", "within a step"])
def test_weights_that_are_others_for_a_while_are_not_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """An evaluation swaps them for averages, and an adversarial loss moves some before its step."""

    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)
        while True:
            rank.fetch()
            if rank.keeper.steps:
                break
            rank.step()
        if where == "report":
            rank.report()
        elif where == "end of epoch":
            rank.keeper.epoch_is_over()
        rank.model[0].weight.data[0, 0] *= 0.5
        if where != "within a step":
            # The loader of the evaluation ends, too.
            rank.keeper.epoch_is_over()
        with pytest.raises(NotCleanError, match="after the step"):
            rank.write(tmp_path)

    within(train)


def test_weights_that_a_step_puts_back_are_written_after_it(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        rank = Rank(monkeypatch)
        rank.report()
        own = rank.model[0].weight.detach().clone()
        rank.model[0].weight.data = own * 0.5
        rank.backward()
        rank.model[0].weight.data = own
        rank.take(rank.optimizer)
        rank.report()
        rank.write(tmp_path)

    within(train)
    assert [*tmp_path.iterdir()]


def test_weights_are_added_up_only_if_their_data_is_in_use() -> None:
    model = torch.nn.Linear(2, 3)
    parts = LiveParts({"model": model})
    assert parts.sample() == ()
    pickle.loads(pickle.dumps(deepcopy(model)))
    assert parts.sample() == ()
    alias = model.weight.data
    assert parts.sample() != ()
    of_earlier_alias = LiveParts({"model": model})
    before = of_earlier_alias.sample()
    alias.mul_(0.5)
    assert of_earlier_alias.sample() != before


def test_a_training_without_such_uses_adds_no_weights_up(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        rank = Rank(monkeypatch)
        for _ in range(3):
            rank.step()
            rank.report()
            point = rank.keeper._points.last
            assert point is not None
            assert point.sample == ()

    within(train)


def test_weights_that_are_moved_to_where_they_are_stay_as_they_are() -> None:
    """Lightning moves its module to the CPU when it ends, also after an error."""
    model = torch.nn.Linear(2, 1)
    parts = LiveParts({"model": model})
    parts.sample()
    model.cpu()
    assert parts.sample() == ()
    on_meta = torch.nn.Parameter(torch.empty(1, device="meta"))
    on_meta.data = torch.empty(1, device="meta")
    assert parts.sample() == ()
    model.double()
    assert parts.sample()


def test_code_without_a_module_reads_the_weights() -> None:
    model = torch.nn.Linear(2, 3)
    LiveParts({"model": model}).sample()
    found: dict[str, torch.Tensor] = {"weight": model.weight}
    exec("sum = weight.data.sum()", {}, found)
    assert found["sum"] == model.weight.sum()


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("factor", [0.5, -1.0])
def test_weights_that_are_all_scaled_have_other_sums(kind: torch.dtype, factor: float) -> None:
    model = torch.nn.Linear(64, 64, dtype=kind)
    parts = LiveParts({"model": model})
    before = parts._sums()
    with torch.no_grad():
        model.weight.mul_(factor)
    assert parts._sums() != before


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_statistics_of_a_lost_rank_are_those_of_its_last_forward_pass(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offset: float
) -> None:
    """It has only computed its gradients; nothing else changes a batch norm's statistics."""

    def train() -> None:
        lost = Rank(monkeypatch)
        lost.forward(offset)
        rank = Rank(monkeypatch)
        rank.step()
        rank.report()
        monkeypatch.setattr(point_writer, "get_context", lambda: World(2))
        rank.write(tmp_path, lost=lost)
        name = "1.running_mean"
        own = tmp_path / "own-1.pt"
        states = torch.load(own)["parts"]["model"] if offset else torch.load(tmp_path / "model.pt")
        assert torch.equal(states[name], lost.model.state_dict()[name])
        assert own.exists() == (offset != 0)

    within(train)


def test_random_numbers_of_a_forward_pass_that_a_lost_rank_has_not_reached_are_unknown(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was lost after its gradients, before another pass that nobody waits for."""

    def train() -> None:
        lost = Rank(monkeypatch)
        lost.forward()
        rank = Rank(monkeypatch)
        rank.step()
        rank.forward()
        rank.report()
        monkeypatch.setattr(point_writer, "get_context", lambda: World(2))
        with pytest.raises(NotCleanError, match="not all of its forward passes are known"):
            rank.write(tmp_path, lost=lost)

    within(train)


def test_what_a_loop_adds_to_a_buffer_after_the_forward_pass_is_not_lost_with_rank_0(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP would send all ranks the buffers that rank 0 had before."""

    def train() -> None:
        lost = Rank(monkeypatch)
        lost.forward(offset=1.0)
        rank = Rank(monkeypatch)
        rank.step()
        rank.model.get_buffer("mask")[0] += 1
        rank.report()
        names, buffers = zip(*rank.model.named_buffers(), strict=True)
        kept = {0: lost.states(), 1: rank.states()}
        sent = set(map(id, buffers))
        _, found = KeptByRank(kept, first=2, point=2, mine=1, buffers=buffers, sent=sent).state(0)
        known = dict(zip(names, found, strict=True))
        assert known["mask"][0] == 1
        assert torch.equal(known["1.running_mean"], lost.model.get_buffer("1.running_mean"))

    within(train)


@pytest.mark.parametrize(
    "where", ["library", "end of epoch", "behind an evaluation within it", "its variable changes"]
)
def test_an_earlier_point_after_the_same_step_is_written_if_the_last_is_not_known_of_all_ranks(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """An evaluation draws random numbers, and the lost rank hasn't ended it."""

    def loader(rank: Rank) -> Iterator[int]:
        for batch in range(3):
            rank.fetch_for(sys._getframe(1))
            yield batch
        rank.fetch_for(sys._getframe(1))
        rank.keeper.epoch_is_over()

    def evaluate(rank: Rank) -> None:
        for _ in loader(rank):
            pass

    def train_epoch(rank: Rank) -> int:
        count = 0
        for _ in loader(rank):
            rank.step()
            count += where == "its variable changes"
            if where == "behind an evaluation within it" and rank.keeper.steps == 2:
                evaluate(rank)
        return count

    def train() -> None:
        monkeypatch.setattr(keeper, "get_context", lambda: World(2))
        lost, rank = (Rank(monkeypatch, fetches=False) for _ in range(2))
        for each in (lost, rank):
            if where == "library":
                each.fetch()
                each.step()
                each.keeper.at_end_of_step(None, {})
            else:
                train_epoch(each)
        before = torch.get_rng_state()
        torch.rand(1)
        later = Place(step=2, metrics={}, positions={})
        monkeypatch.setattr(rank.session, "place", lambda: later)
        rank.report()
        monkeypatch.setattr(point_writer, "get_context", lambda: World(2))
        if where == "its variable changes":
            with pytest.raises(NotCleanError, match="draws random numbers after the step"):
                rank.write(tmp_path, lost=lost)
            return
        place = rank.write(tmp_path, lost=lost)
        assert (place.step, place.is_earlier) == (1, True)
        assert torch.equal(torch.load(tmp_path / file_of(0))["torch"], before)

    within(train)


@pytest.mark.parametrize("size", [1, 2])
def test_variables_are_looked_at_after_an_epoch_only_if_another_rank_can_be_asked(
    within: Within, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A look takes milliseconds, and more with many variables."""
    looks = []

    def train() -> None:
        monkeypatch.setattr(keeper, "get_context", lambda: World(size))
        rank = Rank(monkeypatch)
        monkeypatch.setattr(rank.keeper.continuation, "expect_nothing_carried", looks.append)
        while True:
            rank.fetch()
            if rank.keeper.steps == 2:
                break
            rank.step()
        rank.keeper.epoch_is_over()

    within(train)
    assert len(looks) == size - 1


def test_buffers_that_differ_in_the_first_step_are_not_invented(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before it they are equal on both ranks; the lost one has only computed its gradients."""

    def train() -> None:
        lost = Rank(monkeypatch)
        lost.model.get_buffer("mask")[0] = 1
        lost.forward()
        rank = Rank(monkeypatch)
        rank.step()
        rank.report()
        monkeypatch.setattr(point_writer, "get_context", lambda: World(2))
        with pytest.raises(NotCleanError, match="a buffer differs"):
            rank.write(tmp_path, lost=lost)

    within(train)


class Clock:
    """Shows a time that stands still; nobody may wait for another."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError("it waits")


def test_a_training_that_has_stood_still_is_held_at_once(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began to wait for the lost rank before anybody noticed the loss."""

    def train() -> None:
        clock = Clock()
        monkeypatch.setattr(clean_points, "time", clock)
        rank = Rank(monkeypatch)
        rank.step()
        rank.report()
        with pytest.raises(AssertionError, match="it waits"):
            rank.session.writer.hold(0, lambda: True)
        clock.now += 0.1
        assert rank.session.writer.hold(0, lambda: True) == 2

    within(train)


def test_what_is_written_is_of_the_point_where_the_training_was_held(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It goes on until its next step, and passes other points."""

    def train() -> None:
        rank = Rank(monkeypatch)
        rank.step()
        read = rank.states()
        rank.report()
        point = rank.session.writer.hold(0, lambda: True)
        torch.rand(1)
        rank.keeper.at_report({"loss": 2.0}, {"epoch": 2})
        place = rank.session.writer.write({0: read}, point, tmp_path)
        assert place.metrics == {"loss": 1.0}

    within(train)
    assert torch.load(tmp_path / "state.pt")["progress"] == {"epoch": 1}


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_loop_whose_batches_come_from_elsewhere_is_not_continued(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, evaluates_first: bool
) -> None:
    """Only its evaluation fetches them from a prepared loader: a restart would train again."""

    def loader(rank: Rank) -> Iterator[int]:
        rank.fetch_for(sys._getframe(1))
        yield 1

    def evaluate(rank: Rank) -> None:
        for _ in loader(rank):
            pass

    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)
        if evaluates_first:
            evaluate(rank)
        for _ in range(2):
            rank.step()
            rank.step()
            evaluate(rank)
        with pytest.raises(NotCleanError, match="batches from elsewhere"):
            rank.write(tmp_path)

    within(train)


def test_batches_that_another_thread_has_fetched_are_from_elsewhere(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its loop says nothing of the one that trains, and it fetches some ahead."""

    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)

        def fetch() -> None:
            rank.fetch()

        for _ in range(3):
            thread = threading.Thread(target=fetch)
            thread.start()
            thread.join()
            rank.step()
        fetch()
        with pytest.raises(NotCleanError, match="batches from elsewhere"):
            rank.write(tmp_path)

    within(train)


def test_an_optimizer_that_makes_its_state_anew_in_each_step_is_kept(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        other = torch.nn.Linear(2, 1)
        its = torch.optim.LBFGS(other.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            its.zero_grad()
            rank.keeper.before_backward()
            loss = other(torch.ones(2)).square().sum()
            loss.backward()
            return loss

        rank = Rank(monkeypatch, fetches=False, other=other, its=its)
        while True:
            rank.fetch()
            if rank.keeper.steps == 6:
                break
            rank.step()
            rank.keeper.before_step(its)
            its.step(closure)
            rank.keeper.after_step(its)
        rank.write(tmp_path)

    within(train)
    assert (tmp_path / "state.pt").exists()


class Copies:
    """Notes after which of the optimizer's steps the state is copied."""

    is_unconfirmed = False

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self, write: Callable[[Path], Place], **_: Any) -> None:
        self.steps.append(write.__self__.steps)  # type: ignore[attr-defined]  # it is the keeper's

    def confirm(self) -> None:
        """Have the last one count."""


def test_a_loop_with_a_compiled_optimizer_is_looked_at(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The look isn't compiled with the step."""

    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)
        # Later tests of this process have none that is held.
        monkeypatch.setattr(keeper, "_current", None)
        monkeypatch.setattr(points, "listener", None)
        keeper.start(rank.keeper)
        step = torch.compile(lambda: rank.optimizer.step(), backend="eager")
        while True:
            rank.fetch()
            if rank.keeper.steps == 3:
                break
            rank.forward().square().sum().backward()
            step()
        rank.write(tmp_path)

    within(train)
    assert (tmp_path / "state.pt").exists()


def test_a_copy_counts_once_all_loaders_of_a_step_have_a_batch(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the second has none, the loop is over, and what follows may need its variables."""
    confirmed: list[int] = []
    rank: Any = None

    class Confirmed(Copies):
        def confirm(self) -> None:
            confirmed.append(rank.keeper.steps)

    def batches() -> Iterator[int]:
        for batch in range(3):
            rank.fetch_for(sys._getframe(1))
            rank.keeper.has_batch()
            yield batch

    def train() -> None:
        nonlocal rank
        rank = Rank(monkeypatch, fetches=False)
        rank.session.copies = Confirmed()
        for _ in zip(batches(), batches(), strict=True):
            rank.step()
        # Before the first step nobody knows that there is a second loader.
        assert confirmed == [0, 1, 2, 3]
        confirmed.clear()
        for _ in range(2):
            for _ in batches():
                rank.step()
            rank.fetch()
            rank.keeper.epoch_is_over()
        assert confirmed == [3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9]

    within(train)


@pytest.mark.parametrize("by_for", [False, True])
@pytest.mark.parametrize("carries", [False, True])
def test_after_one_step_variables_are_compared_with_those_before_it(
    within: Within,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    carries: bool,
    by_for: bool,
) -> None:
    """A counter is still what it was when the optimizer stepped first."""
    copies = Copies()

    def loader(rank: Rank) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(2):
            rank.fetch_for(sys._getframe(1))
            yield torch.ones(2), torch.ones(1)

    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)
        rank.session.copies = copies
        count = 0
        if by_for:
            for x, y in loader(rank):
                if rank.keeper.steps:
                    break
                assert x.sum() > y
                count += carries
                rank.step()
        else:
            while True:
                rank.fetch()
                if rank.keeper.steps:
                    break
                count += carries
                rank.step()
        if not carries:
            rank.write(tmp_path)
            return
        with pytest.raises(
            NotCleanError, match="one step since it started, and its variable 'count'"
        ):
            rank.write(tmp_path)
        assert count == 1

    within(train)
    assert copies.steps == []


def test_what_a_loop_drops_in_its_first_step_is_let_go(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)
        # Only its identity is compared.
        large: torch.Tensor | None = torch.empty(1, device="meta")
        dropped = weakref.ref(large)
        while True:
            rank.fetch()
            if rank.keeper.steps == 10:
                break
            if large is not None:
                large = None
            rank.step()
        gc.collect()
        assert dropped() is None

    within(train)


@pytest.mark.parametrize("by_next", [False, True])
def test_a_loop_is_continued_that_comes_after_looks_at_batches(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_next: bool
) -> None:
    def loader(rank: Rank) -> Iterator[int]:
        for batch in range(3):
            rank.fetch_for(sys._getframe(1))
            yield batch

    def train() -> None:
        rank = Rank(monkeypatch, fetches=False)
        next(loader(rank))
        for _ in loader(rank):
            break
        for _ in loader(rank):
            next(loader(rank))
        if by_next:
            while True:
                rank.fetch()
                if rank.keeper.steps == 2:
                    break
                rank.step()
        else:
            for _ in loader(rank):
                if rank.keeper.steps < 2:
                    rank.step()
        rank.write(tmp_path)

    within(train)
    assert (tmp_path / "state.pt").exists()


class Table:
    """A part that has much to save."""

    def state_dict(self) -> dict[str, Any]:
        return {"values": torch.zeros(5 << 20)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class _Private:
    """A state of a user's hook."""


def test_what_communication_hooks_keep_is_in_no_state(within: Within) -> None:
    def why_not(hook: Any, state: Any) -> str | None:
        model = prepare_model(torch.nn.Linear(2, 2))
        model.register_comm_hook(state, hook)
        parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
        return LiveParts(parts).begin(whose="its state", copies_shards=False, copies_gpu=False)

    def train() -> None:
        # torch refuses a hook with an annotation that is a string, as this module's are.
        own = lambda state, bucket: default_hooks.allreduce_hook(state, bucket)  # noqa: E731
        wrap = default_hooks.fp16_compress_wrapper
        group = dist.group.WORLD
        average = partial(default_hooks.allreduce_hook, group)
        around = lambda state, bucket: average(bucket)  # noqa: E731
        for hook in (default_hooks.fp16_compress_hook, wrap(default_hooks.allreduce_hook), own):
            assert why_not(hook, None) is None
        assert why_not(around, group) is None
        power, state = powerSGD_hook.powerSGD_hook, PowerSGDState(None)
        compress = partial(power, state)
        for hook, of_hook in (
            (power, state),
            (own, _Private()),
            (MethodType(power, state), None),
            (wrap(MethodType(power, state)), None),
            (lambda _, bucket: compress(bucket), None),
            (lambda _, bucket: power(state, bucket), None),
        ):
            assert "communication hook with a state" in str(why_not(hook, of_hook))
        for hook in (noop_hook, wrap(noop_hook)):
            assert "averages nothing" in str(why_not(hook, None))

    within(train)


class Passes:
    """A model's passes, of which a keeper is told as by hooks."""

    def __init__(self, model: Any, keeps: Keeper) -> None:
        self._model, self._keeps = model, keeps

    def forward(self, *, syncs: bool = True) -> torch.Tensor:
        with nullcontext() if syncs else self._model.no_sync():
            found: torch.Tensor = self._model(torch.ones(1, 2)).sum()
        return found

    def without_gradients(self) -> None:
        with torch.no_grad():
            self.forward()

    def backward(self, loss: torch.Tensor, *, syncs: bool = True) -> None:
        self._keeps.before_backward()
        with nullcontext() if syncs else self._model.no_sync():
            loss.backward()


def with_a_pass_between(passes: Passes, *, syncs: bool) -> None:
    loss = passes.forward(syncs=syncs)
    passes.without_gradients()
    passes.backward(loss)


@pytest.mark.parametrize(
    ("train_net", "are_local"),
    [
        (lambda net: net.backward(net.forward()), False),
        (lambda net: net.backward(net.forward(syncs=False), syncs=False), True),
        # DDP decides in the forward pass.
        (lambda net: net.backward(net.forward(syncs=False)), True),
        (lambda net: net.backward(net.forward(), syncs=False), False),
        (lambda net: with_a_pass_between(net, syncs=True), False),
        (lambda net: with_a_pass_between(net, syncs=False), True),
    ],
)
def test_a_step_whose_gradients_ddp_has_not_averaged_is_noticed(
    within: Within,
    monkeypatch: pytest.MonkeyPatch,
    train_net: Callable[[Passes], None],
    are_local: bool,
) -> None:
    """Also if it comes after another model's backward pass, or after an accumulation."""

    def train() -> None:
        net, critic = prepare_model(torch.nn.Linear(2, 2)), prepare_model(torch.nn.Linear(2, 2))
        its = torch.optim.SGD(net.parameters(), lr=0.1)
        other = torch.optim.SGD(critic.parameters(), lr=0.1)
        monkeypatch.setattr(live_parts, "dist", World(2))
        parts = {"model": net, "optimizer": its, "critic": critic, "other": other}
        rank = Rank(monkeypatch, fetches=False, **parts)
        of_net, of_critic = Passes(net, rank.keeper), Passes(critic, rank.keeper)
        while True:
            rank.fetch()
            if rank.keeper.steps == 6:
                break
            of_net.backward(of_net.forward(syncs=False))
            train_net(of_net)
            of_net.without_gradients()
            of_critic.backward(of_critic.forward())
            rank.take(other)
            assert not rank.keeper.continuation.why_not
            rank.take(its)
            if are_local:
                break
        reason = "the gradients of a step were each rank's own, by no_sync()"
        assert rank.keeper.continuation.why_not == (reason if are_local else "")

    within(train)


def test_what_is_copied_at_each_batch_has_a_limit(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        rank = Rank(monkeypatch, table=Table())
        assert rank.session.kept is None
        assert rank.session.why_not == "its buffers and small parts have 21 MB"

    within(train)


def kept(
    rank: str, loss: float | None, *, point: int, is_forecast: bool = False, **own: Any
) -> KeptState:
    """A small state, with a loss of its own if that was known, and more that it has alone."""
    known = None if loss is None else {"loss": loss, **own}
    return small_state(rank, known, point=point, is_forecast=is_forecast)


@pytest.mark.parametrize(("forecast", "expected"), [(0.5, 0.25), (None, 0.5), (0.75, 0.5)])
def test_a_lost_ranks_loss_is_its_own_if_it_was_known(
    forecast: float | None, expected: float
) -> None:
    """This rank's forecast was right, or there was none, or it was wrong."""
    before = [kept("0", 0.0, point=1), kept("1", 0.0, point=1)]
    by_rank = {
        0: [before[0], kept("0", forecast, point=2, is_forecast=True), kept("0", 0.5, point=2)],
        1: [before[1], kept("1", forecast and 0.25, point=2, is_forecast=True)],
    }
    ranks = KeptByRank(by_rank, first=2, point=2, mine=0, buffers=[], sent=set())
    state, _ = ranks.state(1)
    assert state["own"] == {"loss": expected}
    assert state["random"][0] == b"1"


@pytest.mark.parametrize(
    ("norms", "unknown"),
    [((3.0, 3.0), ""), ((3.0, 4.0), "logged.norm"), ((None, None), "logged.norm")],
)
def test_what_ranks_log_alike_after_the_forward_pass_is_known_of_a_lost_one(
    norms: tuple[float | None, float | None], unknown: str
) -> None:
    """Its loss is its own. The norm is this rank's, if both have always had the same one."""

    def logged(norm: float | None) -> dict[str, Any]:
        return {} if norm is None else {"logged": {"norm": norm}}

    by_rank = {
        rank: [
            kept("", 0.0, point=2, **logged(norms[rank])),
            kept("", rank + 0.5, point=3, is_forecast=True, **logged(norms[rank])),
        ]
        for rank in (0, 1)
    }
    by_rank[0].append(kept("", 0.5, point=3, **logged(5.0)))
    ranks = KeptByRank(by_rank, first=3, point=3, mine=0, buffers=[], sent=set(), needs_own=True)
    if unknown:
        with pytest.raises(NotCleanError, match=f"what it had alone isn't known: {unknown}"):
            ranks.state(1)
    else:
        assert ranks.state(1)[0]["own"] == {"loss": 1.5, **logged(5.0)}


def of_virtual_workers(*before: KeptState) -> KeptByRank:
    """Rank 1 was lost in its third step, before which it had these states."""
    mine = [kept("1", 0.1, point=2), kept("", 0.0, point=3), kept("2", 0.5, point=4)]
    return KeptByRank(
        {0: mine, 1: before}, first=4, point=4, mine=0, buffers=[], sent=set(), are_alike=True
    )


def test_a_lost_rank_with_virtual_workers_would_have_drawn_what_this_one_has() -> None:
    state, _ = of_virtual_workers(kept("0", 0.9, point=1), kept("", 0.0, point=3)).state(1)
    assert (state["random"][0], state["own"]) == (b"2", {"loss": 0.5})


@pytest.mark.parametrize(
    "before",
    [
        [kept("1", 0.0, point=3)],
        [kept("", 0.1, point=3)],
        [kept("1", 0.2, point=2), kept("", 0.0, point=3)],
        [kept("1", 0.1, point=2)],
        [],
    ],
)
def test_a_lost_rank_with_virtual_workers_that_was_another_before_is_not_replaced(
    before: list[KeptState],
) -> None:
    """Being alike once may be chance, as after a counter was set to zero."""
    with pytest.raises(NotCleanError, match=r"rank 1 .* isn't known to be like the others"):
        of_virtual_workers(*before).state(1)


def with_place(state: KeptState, place: int | None) -> KeptState:
    """The small state with the place of a loader that isn't split."""
    *lengths, length = LENGTHS.unpack_from(state.content)
    head = state.content[: len(state.content) - length]
    small = pickle.loads(state.content[-length:])
    small["places"] = {} if place is None else {"data loader 0": place}
    content = pickle.dumps(small)
    head = LENGTHS.pack(*lengths, len(content)) + head[LENGTHS.size :]
    return KeptState(point=state.point, is_forecast=False, content=head + content)


@pytest.mark.parametrize(("place", "is_known"), [(0, True), (3, False)])
@pytest.mark.parametrize("are_alike", [True, False])
def test_a_loader_that_nobody_reads_meanwhile_is_no_hindrance(
    place: int, is_known: bool, are_alike: bool
) -> None:
    before = [with_place(kept("", 0.0, point=point), 0) for point in (2, 3)]
    by_rank = {0: [*before, with_place(kept("", 0.0, point=4), place)], 1: before}
    by_rank = {
        rank: [*states, kept("", None, point=4, is_forecast=True)]
        for rank, states in by_rank.items()
    }
    ranks = KeptByRank(
        by_rank, first=4, point=4, mine=0, buffers=[], sent=set(), are_alike=are_alike
    )
    if is_known:
        assert ranks.state(1)[0]["places"] == {"data loader 0": 0}
    else:
        with pytest.raises(NotCleanError, match="place in its data isn't known"):
            ranks.state(1)


def test_a_part_that_differed_before_is_not_taken_from_another_rank() -> None:
    def counted(count: int, *, point: int) -> KeptState:
        state = kept("", 0.0, point=point)
        *lengths, length = LENGTHS.unpack_from(state.content)
        small = pickle.dumps({**pickle.loads(state.content[-length:]), "parts": {"count": count}})
        return KeptState(
            point=point, is_forecast=False, content=LENGTHS.pack(*lengths, len(small)) + small
        )

    forecast = kept("", None, point=4, is_forecast=True)
    mine = [counted(5, point=2), counted(0, point=3), counted(2, point=4), forecast]
    its = [counted(6, point=2), counted(0, point=3), forecast]
    ranks = KeptByRank({0: mine, 1: its}, first=4, point=4, mine=0, buffers=[], sent=set())
    with pytest.raises(NotCleanError, match="a part of TrainingState differs"):
        ranks.state(1)
