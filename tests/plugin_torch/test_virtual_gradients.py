"""Sums of gradients that begin while a backward pass continues, without other ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polytrain_torch.collectives.tree_sums import Vector, join
from polytrain_torch.virtual_workers import gradients as virtual_gradients
from polytrain_torch.virtual_workers.gradients import Gradients

LAYERS, WIDTH = 4, 8


class Twins:
    """Another rank that computes the same gradients as this one."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.lengths: list[int] = []

    def begin(self, sums: list[Vector]) -> Callable[[], Vector]:
        [mine] = map(join, sums)
        self.events.append("sum")
        self.lengths.append(len(mine))
        return lambda: [mine.mul_(2)]


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Twins:
    monkeypatch.setattr(virtual_gradients, "_BUCKET", WIDTH * WIDTH * 4)
    monkeypatch.setattr(virtual_gradients.dist, "get_world_size", lambda: 2)
    return Twins()


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def gradients_of(model: torch.nn.Module, twins: Twins) -> Gradients:
    return Gradients(model.parameters(), 2, twins.begin, overlaps=True)


def in_loop(gradients: Gradients, body: Callable[[], None]) -> None:
    """A loop over one micro-batch."""
    gradients.begin()
    gradients.expect_last(0)
    body()
    gradients.take(0)
    gradients.average()


def values_of(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [each.grad if each.grad is None else each.grad.clone() for each in model.parameters()]


def are_equal(mine: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(mine, theirs, strict=True)
    )


X = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


def test_sums_begin_from_the_last_layer_on_while_the_backward_pass_continues(twins: Twins) -> None:
    model = network()
    gradients = gradients_of(model, twins)
    for number, layer in enumerate(model):
        layer.bias.register_hook(lambda _, n=number: twins.events.append(f"backward {n}"))
    in_loop(gradients, lambda: model(X).sum().backward())
    begun = twins.events.index("sum")
    assert begun < twins.events.index("backward 0")
    assert twins.events.index("backward 3") < begun
    assert twins.events.count("sum") == LAYERS


def test_an_unused_parameter_delays_its_bucket_and_those_after_it_but_no_order(
    twins: Twins,
) -> None:
    model, alone = network(), network()
    gradients = gradients_of(model, twins)
    used = twins.lengths
    in_loop(gradients, lambda: model(X).sum().backward())
    order, twins.lengths = [*used], []

    def skips(of: torch.nn.Sequential) -> None:
        of[3](of[1](of[0](X))).sum().backward()

    for each in (model, alone):
        each.zero_grad()
    in_loop(gradients, lambda: skips(model))
    skips(alone)
    assert twins.lengths == order
    assert model[2].weight.grad is None
    assert are_equal(values_of(model), values_of(alone))


@pytest.mark.parametrize("change", ["second backward", "through data", "taken away", "replaced"])
def test_a_gradient_that_changes_after_its_sum_has_begun_is_summed_again(
    twins: Twins, change: str
) -> None:
    def body(of: torch.nn.Sequential) -> None:
        loss = of(X).square().sum()
        loss.backward(retain_graph=True)
        if change == "second backward":
            loss.backward()
        elif change == "through data":
            of[3].weight.grad.data.clamp_(-0.1, 0.1)
        elif change == "taken away":
            of[3].weight.grad = None
        else:
            of[3].weight.grad = of[3].weight.grad.sign()

    model, alone = network(), network()
    gradients = gradients_of(model, twins)
    body(alone)
    for _ in range(2):
        model.zero_grad()
        in_loop(gradients, lambda: body(model))
        assert are_equal(values_of(model), values_of(alone))
    # Each of the second loop's sums is made once: none begins early any more.
    assert twins.lengths[-LAYERS:] == twins.lengths[:LAYERS]
    assert len(twins.lengths) < 3 * LAYERS


def test_a_rank_that_waited_sums_again_what_another_rank_changed(twins: Twins) -> None:
    def begin(sums: list[Vector]) -> Callable[[], Vector]:
        if len(twins.lengths) == LAYERS - 1:
            # After the layer's values, and whether they are used: the other rank's mark.
            sums[0][-1][2] = 1
        return twins.begin(sums)

    model, alone = network(), network()
    gradients = Gradients(model.parameters(), 2, begin, overlaps=True)
    # Without the last layer, no sum begins early.
    in_loop(gradients, lambda: model[:3](X).square().sum().backward())
    alone[:3](X).square().sum().backward()
    assert len(twins.lengths) == LAYERS + 1
    assert are_equal(values_of(model), values_of(alone))


@pytest.mark.parametrize("clips", [False, True])
def test_a_rank_with_several_subtrees_begins_fewer_sums_early(twins: Twins, clips: bool) -> None:
    """Rank 1 of 2 has the virtual workers 3 to 5: the pair of the last two, and one."""
    subtrees: list[int] = []
    begun_early = 0

    def begin(sums: list[Vector]) -> Callable[[], Vector]:
        subtrees.append(len(sums))
        total = join(sums.pop(0))
        return lambda: [total.add_(join(sums.pop(0)))]

    def body(of: torch.nn.Sequential, number: int) -> None:
        of(X * number).square().sum().backward()
        if clips:
            of[3].weight.grad.data.clamp_(-0.1, 0.1)

    model, alone = network(), network()
    gradients = Gradients(model.parameters(), 6, begin, overlaps=True)
    gradients.begin()
    for number in (5, 4, 3):
        if number == 3:
            gradients.expect_last(number)
        body(model, number)
        begun_early = len(subtrees)
        gradients.take(number)
    gradients.average()
    sums = {}
    for number in (5, 4, 3):
        alone.zero_grad()
        body(alone, number)
        sums[number] = values_of(alone)
    for parameter, *parts in zip(model.parameters(), sums[3], sums[4], sums[5], strict=True):
        first, second, third = parts
        assert torch.equal(parameter.grad, (first + (second + third)) / 6)
    # One set that is made, two that are held, and half a set of sums: below 1 + log2(6).
    assert begun_early == LAYERS // 2
    assert subtrees == [2] * (LAYERS + clips)


@pytest.mark.parametrize("used", [LAYERS, LAYERS - 1])
def test_what_other_ranks_used_is_read_only_for_parameters_without_a_gradient(
    twins: Twins, used: int
) -> None:
    """Reading it makes a rank wait for its GPU."""
    read: list[int] = []

    class Flags(torch.Tensor):
        def tolist(self) -> list[float]:
            read.append(len(self))
            return super().tolist()

    def begin(sums: list[Vector]) -> Callable[[], Vector]:
        [total] = sums
        flags = total[-1].mul(2).as_subclass(Flags)
        return lambda: [*(each.mul(2) for each in total[:-1]), flags]

    model, alone = network(), network()
    gradients = Gradients(model.parameters(), 2, begin, overlaps=False)
    in_loop(gradients, lambda: model[:used](X).square().sum().backward())
    alone[:used](X).square().sum().backward()
    assert are_equal(values_of(model), values_of(alone))
    # The whole network is one bucket of two parameters for each layer.
    assert read == ([] if used == LAYERS else [2 * LAYERS])


def test_reading_a_gradient_in_the_loop_sums_nothing_again(twins: Twins) -> None:
    model = network()

    def body() -> None:
        model(X).square().sum().backward()
        assert torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]) > 0
        assert model[3].weight.grad.abs().max().item() > 0

    in_loop(gradients_of(model, twins), body)
    assert len(twins.lengths) == LAYERS


def test_a_hook_that_raises_ends_the_backward_pass_with_its_error(twins: Twins) -> None:
    model = network()

    def fails(_: torch.Tensor) -> None:
        raise OverflowError("of the user's hook")

    gradients = gradients_of(model, twins)
    model[1].weight.register_post_accumulate_grad_hook(fails)
    gradients.begin()
    gradients.expect_last(0)
    with pytest.raises(OverflowError, match="of the user's hook"):
        model(X).sum().backward()
    gradients.expect_none()
    begun = len(twins.lengths)
    assert begun < LAYERS
    with pytest.raises(OverflowError):
        model(X).sum().backward()
    assert len(twins.lengths) == begun


def test_a_sum_that_fails_ends_the_backward_pass(twins: Twins) -> None:
    def lost(_: list[Vector]) -> Callable[[], Vector]:
        raise ConnectionError("rank 1 is lost")

    model = network()
    gradients = Gradients(model.parameters(), 2, lost, overlaps=True)
    gradients.begin()
    gradients.expect_last(0)
    with pytest.raises(ConnectionError, match="rank 1 is lost"):
        model(X).sum().backward()


def test_parameters_are_left_alone_afterwards(twins: Twins) -> None:
    model = network()
    gradients = gradients_of(model, twins)
    gradients.expect_last(0)
    gradients.close()
    model(X).sum().backward()
    assert twins.lengths == []


def test_gradients_that_overlap_are_taken_apart() -> None:
    """A user's backward function may return views that begin at different places."""
    values = torch.arange(4.0)
    seen: set[int] = set()
    one, other = virtual_gradients._apart([values[0:2], values[1:3]], seen)
    assert one is not None
    assert other is not None
    one.mul_(10)
    assert other.tolist() == [1, 2]
