"""Gradients of one rank are weighted by its share of a batch's rows, whatever the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.plugin_torch.conftest import Run
from tests.shards import shard_of

from polytrain_torch.row_weights import (
    weigh_backward,
    weigh_model,
    weigh_rows,
    weight_of,
    weighted_gradient,
    weighted_loop,
)
from polytrain_torch.shard import TorchShard

X = torch.arange(6.0).view(2, 3)


@pytest.fixture(autouse=True)
def weighing() -> Iterator[None]:
    yield
    weigh_rows()


def weight_now() -> float:
    return weighted_gradient(torch.ones(1)).item()


class Returning(torch.nn.Module):
    """A layer whose output is packed."""

    def __init__(self, packed: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 3)
        self.packed = packed or (lambda output: output)

    def forward(self, x: Any) -> Any:
        return self.packed(self.layer(x))


def gradient_of(model: Any, *, weight: float | None, unpacked: Any = None) -> torch.Tensor:
    model.zero_grad()
    with weighted_loop() as loop:
        if weight is not None:
            loop.given(weight)
        output = model(X)
        (output if unpacked is None else unpacked(output)).square().mean().backward()
    gradient: torch.Tensor = model.layer.weight.grad.clone()
    return gradient


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    loss: Any
    name: str = "mine"


@pytest.mark.parametrize(
    ("packed", "unpacked"),
    [
        (lambda y: y, lambda y: y),
        (lambda y: {"a": [y]}, lambda y: y["a"][0]),
        (lambda y: Pair(y, y * 2), lambda y: y.second - y.first),
        (Output, lambda y: y.loss),
        # The loss is made of another output, which isn't weighted a second time.
        (lambda y: (y, y.square()), lambda y: y[1]),
    ],
    ids=["tensor", "dict", "named tuple", "data class", "loss and logits"],
)
def test_a_model_s_gradients_are_weighted_in_any_output(packed: Any, unpacked: Any) -> None:
    model = Returning(packed)
    plain = gradient_of(model, weight=0.5, unpacked=unpacked)
    weigh_model(model)
    weighted = gradient_of(model, weight=0.5, unpacked=unpacked)
    assert torch.allclose(weighted, plain / 2)
    assert torch.equal(gradient_of(model, weight=None, unpacked=unpacked), plain)
    weigh_rows(False)
    assert torch.equal(gradient_of(model, weight=0.5, unpacked=unpacked), plain)


def test_an_output_without_tensors_that_are_found_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Own:
        def __init__(self, value: Any) -> None:
            self.value = value

    model = Returning(Own)
    weigh_model(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            gradient_of(model, weight=0.5, unpacked=lambda own: own.value)
    [messages] = [record.getMessage() for record in caplog.records]
    assert "returns a " in messages
    assert "Own" in messages


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_models_one_behind_the_other_are_each_weighted_once(weight: float) -> None:
    """Such as a generator and a discriminator."""
    first, second = Returning(), Returning()
    second(first(X)).square().mean().backward()
    plain = [model.layer.weight.grad.clone() for model in (first, second)]
    for model in (first, second):
        model.zero_grad()
        weigh_model(model)
    with weighted_loop() as loop:
        loop.given(weight)
        second(first(X)).square().mean().backward()
    for model, gradient in zip((first, second), plain, strict=True):
        assert torch.allclose(model.layer.weight.grad, gradient * weight)


def test_each_backward_pass_has_the_weight_of_its_batch() -> None:
    """Gradients that are added up over batches."""
    model = Returning()
    plain = gradient_of(model, weight=None)
    weigh_model(model)
    model.zero_grad()
    with weighted_loop() as loop:
        for weight in (1.0, 1.5):
            loop.given(weight)
            model(X).square().mean().backward()
        loop.given(1.0)
        first = model(X)
        loop.given(0.25)
        # One pass, over the losses of two batches.
        (first.square().mean() + model(X).square().mean()).backward()
    assert torch.allclose(model.layer.weight.grad, plain * (1 + 1.5 + 1 + 0.25))


def test_what_isn_t_a_number_counts_nothing_on_a_rank_without_rows() -> None:
    model = Returning()
    weigh_model(model)
    assert not gradient_of(model, weight=0.0, unpacked=lambda y: y * float("nan")).any()


def test_an_output_may_be_written_to() -> None:
    model = Returning()
    weigh_model(model)
    assert gradient_of(model, weight=0.5, unpacked=lambda y: y.add_(1)).any()


def test_no_gradient_is_weighted_where_none_is_made() -> None:
    model = Returning()
    weigh_model(model)
    with weighted_loop() as loop, torch.no_grad():
        loop.given(0.5)
        assert not model(X).requires_grad


def test_a_library_s_backward_is_weighted_once() -> None:
    class Library:
        def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
            loss.backward(retain_graph=retain_graph)

    library: Any = Library()
    weigh_backward(library)
    weigh_backward(library)
    parameter = torch.ones(1, requires_grad=True)
    with weighted_loop() as loop:
        loop.given(0.5)
        library.backward(parameter.sum(), retain_graph=True)
    assert parameter.grad is not None
    assert parameter.grad.item() == 0.5


def test_a_loop_within_a_loop_leaves_its_weight() -> None:
    """Such as a validation in the middle of an epoch."""
    assert weight_now() == 1
    with weighted_loop() as outer:
        outer.given(0.5)
        with weighted_loop() as inner:
            assert weight_now() == 1
            inner.given(0.25)
            assert weight_now() == 0.25
        assert weight_now() == 0.5
    assert weight_now() == 1


def test_of_two_loops_the_latest_batch_counts() -> None:
    with weighted_loop() as one, weighted_loop() as other:
        one.given(0.5)
        other.given(0.25)
        one.given(0.75)
        assert weight_now() == 0.75


def shards() -> Iterator[Any]:
    """Of three rows two ranks have one and two."""
    for rank in range(2):
        yield TorchShard(shard_of({"x": np.arange(3.0)}, world_size=2, rank=rank))


def test_a_shard_s_batches_have_weights_in_any_format() -> None:
    weights = [
        [weight_now() for _ in batches(shard)]
        for shard in shards()
        for batches in (
            lambda shard: shard.iter_torch_batches(batch_size=2),
            lambda shard: shard.iter_batches(batch_size=2),
            lambda shard: shard.iter_batches(batch_size=2, prefetch_batches=3),
        )
    ]
    assert weights == [[pytest.approx(2 / 3)]] * 3 + [[pytest.approx(4 / 3)]] * 3
    assert weight_now() == 1


def test_a_function_that_reads_the_weight_weighs_by_itself() -> None:
    model = Returning()
    weigh_model(model)
    for shard in shards():
        for _ in shard.iter_torch_batches(batch_size=2):
            # The forward pass comes before the weight is read.
            loss = model(X).square().mean()
            assert shard.gradient_weight != 1
            model.zero_grad()
            loss.backward()
            assert torch.allclose(model.layer.weight.grad, gradient_of(model, weight=None))
        for _ in shard.iter_torch_batches(batch_size=2):
            assert weight_now() == 1


def test_a_loop_that_is_left_has_no_weight() -> None:
    [shard, _] = shards()
    for _ in shard.iter_torch_batches(batch_size=1):
        break
    assert weight_now() == 1


def test_a_batch_that_is_taken_ahead_keeps_its_weight() -> None:
    for shard, weight in zip(shards(), (2 / 3, 4 / 3), strict=True):
        [batch] = shard.iter_torch_batches(batch_size=2)
        assert weight_of(batch) == pytest.approx(weight)
        assert weight_of({"x": torch.ones(1)}) == weight_of("no tensor") == 1


def test_a_tensor_that_is_given_again_has_its_latest_weight() -> None:
    batch = torch.ones(1)
    with weighted_loop() as loop:
        for weight in (0.5, 1.0, 2.0):
            loop.given(weight, batch)
            assert weight_of(batch) == weight


def test_lightning_takes_batches_of_unknown_number_ahead(run: Run) -> None:
    """To learn which one is the last."""

    def train() -> None:
        import lightning

        import polytrain
        from polytrain_torch.lightning import Trainer

        class Unsized:
            def __iter__(self) -> Iterator[torch.Tensor]:
                with weighted_loop() as loop:
                    for weight in (1.0, 2.0, 0.5):
                        batch = torch.ones(1)
                        loop.given(weight, batch)
                        yield batch

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.parameter = torch.nn.Parameter(torch.zeros(1))
                self.seen: list[float] = []

            def training_step(self, batch: Any, _: int) -> Any:
                return self.parameter.sum()

            def on_before_optimizer_step(self, _: Any) -> None:
                assert self.parameter.grad is not None
                self.seen.append(self.parameter.grad.item())

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        module = Module()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        Trainer(max_epochs=1, **quiet).fit(module, Unsized())
        polytrain.report({"seen": module.seen})

    assert run(train).metrics["seen"] == [1.0, 2.0, 0.5]
