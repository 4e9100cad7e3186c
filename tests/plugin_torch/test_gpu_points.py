"""Which point a GPU is at, and what is kept of it, with a simulated queue.

`tests/gpu` has the same on a GPU.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugin_torch.kept_ranks import state_of, written
from tests.plugin_torch.simulated_gpu import SimulatedGpu, simulate_gpu
from tests.plugin_torch.test_keeper import Rank, Within, World, within

from polytrain.extension import NotCleanError
from polytrain_torch.survivors import point_writer
from polytrain_torch.survivors.gpu_copies import STAMPS, GpuCopies, arrived, key_of
from polytrain_torch.survivors.gpu_points import GpuPoints

__all__ = ["within"]


@dataclass(frozen=True)
class Point:
    number: int


@pytest.fixture
def gpu() -> SimulatedGpu:
    return SimulatedGpu()


@pytest.fixture
def points(gpu: SimulatedGpu) -> GpuPoints[Point]:
    return GpuPoints(gpu.queue)


def test_a_gpu_is_at_the_last_point_until_the_gradients_of_the_next_step(
    gpu: SimulatedGpu, points: GpuPoints[Point]
) -> None:
    assert points.current() is None
    points.reach(Point(1))
    assert points.current() is None, "it isn't there yet"
    gpu.work_off()
    points.leave([1])
    # The CPU goes on to the next point, and the GPU waits for the gradients.
    points.reach(Point(2))
    assert points.current() == Point(1)
    assert points.versions_after(1) == [1]
    gpu.work_off(but=1)
    assert points.current() is None, "the gradients have arrived"
    gpu.work_off()
    assert points.current() == Point(2)
    assert points.versions_after(2) is None


def test_of_two_points_after_a_step_a_gpu_is_at_the_last_that_it_has_reached(
    gpu: SimulatedGpu, points: GpuPoints[Point]
) -> None:
    points.reach(Point(1))
    points.reach(Point(2))
    points.leave([7])
    gpu.work_off(but=2)
    assert points.current() == Point(1)
    gpu.work_off(but=1)
    assert points.current() == Point(2)
    points.leave([8])
    assert points.versions_after(2) == [7], "its second optimizer has queued a step"
    gpu.work_off()
    assert points.current() is None


def test_the_cpu_waits_before_the_point_of_the_gpu_is_forgotten(gpu: SimulatedGpu) -> None:
    waits = threading.Event()

    class Event:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            waits.set()

    points: GpuPoints[Point] = GpuPoints(Event)
    for number in range(1, 10):
        points.wait()
        points.reach(Point(number))
        if waits.is_set():
            break
        points.leave([number])
    assert number == 5


@pytest.mark.parametrize("shape", ["plain", "transposed", "channels last", "every other", "empty"])
def test_copies_have_the_values_and_the_order_of_the_original(
    monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    simulate_gpu(monkeypatch)
    # More than one chunk.
    whole = torch.arange(2 * 3 * 1000 * 1000, dtype=torch.float32).reshape(2, 3, 1000, 1000)
    tensor = {
        "plain": whole,
        "transposed": whole.transpose(0, 2),
        "channels last": whole.contiguous(memory_format=torch.channels_last)[1:],
        "every other": whole[:, :, ::2],
        "empty": whole[:0],
    }[shape]
    copies = GpuCopies(torch.device("cpu")).copied([tensor])
    copy = copies[key_of(tensor.detach())]
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert shape == "every other" or copy.stride() == tensor.stride()


def test_buffers_count_once_their_stamp_has_arrived() -> None:
    assert arrived(STAMPS.pack(3, 2) + b"buffers") is None
    assert arrived(STAMPS.pack(3, 3) + b"buffers") == b"buffers"


def at_a_point(monkeypatch: pytest.MonkeyPatch) -> tuple[SimulatedGpu, Rank]:
    """A GPU, and a rank that has reported after a step, which the GPU has done."""
    gpu = simulate_gpu(monkeypatch)
    rank = Rank(monkeypatch)
    rank.step()
    rank.report()
    gpu.work_off()
    return gpu, rank


def queue_step(rank: Rank) -> None:
    """Do what an optimizer does at once when it queues a step: its values change on the GPU."""
    rank.forward().square().sum().backward()
    rank.keeper.before_step(rank.optimizer)
    for parameter in rank.model.parameters():
        with torch.no_grad():
            parameter.add_(0)
        rank.optimizer.state[parameter]["step"] += 1
    rank.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_state_of_the_point_of_the_gpu_is_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: int
) -> None:
    def train() -> None:
        gpu = simulate_gpu(monkeypatch)
        rank = Rank(monkeypatch)
        for _ in range(3):
            rank.step()
            rank.report()
            gpu.work_off()
        expected = state_of(rank.model, rank.optimizer)
        for _ in range(ahead):
            queue_step(rank)
            rank.report()
        rank.write(tmp_path)
        found = written(tmp_path)
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        groups = torch.load(tmp_path / "state.pt")["parts"]["optimizer"]["param_groups"]
        assert groups[0]["lr"] == 0.001

    within(train)


class Average(torch.nn.Module):
    """As of `AveragedModel`, its number of steps is on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("sums", torch.zeros(3))


def test_a_buffer_on_the_cpu_is_that_of_the_point_of_the_gpu(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        gpu = simulate_gpu(monkeypatch)
        average = Average()
        rank = Rank(monkeypatch, average=average)
        rank.step()
        average.count += 1
        rank.report()
        gpu.work_off()
        queue_step(rank)
        average.count += 1
        rank.report()
        rank.write(tmp_path)
        found = torch.load(tmp_path / "state.pt")["parts"]["average"]
        assert (found["count"], found["sums"].tolist()) == (1, [0, 0, 0])

    within(train)


def test_weights_that_were_changed_before_a_queued_step_are_not_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        gpu = simulate_gpu(monkeypatch)
        rank = Rank(monkeypatch)
        rank.step()
        rank.report()
        with torch.no_grad():
            rank.model[0].weight.mul_(0.5)
        gpu.work_off()
        queue_step(rank)
        with pytest.raises(NotCleanError, match="changed after the step"):
            rank.write(tmp_path)

    within(train)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_number_that_a_queued_step_has_raised_is_not_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: int
) -> None:
    """Optimizers of one's own may count steps without tensors."""

    def train() -> None:
        gpu = simulate_gpu(monkeypatch)
        rank = Rank(monkeypatch)
        rank.step()
        first = rank.optimizer.state[rank.model[0].weight]
        first["count"] = 1
        rank.report()
        gpu.work_off()
        for _ in range(ahead):
            queue_step(rank)
            first["count"] += 1
        if not ahead:
            rank.write(tmp_path)
            return
        with pytest.raises(NotCleanError, match="state isn't all tensors"):
            rank.write(tmp_path)

    within(train)
    assert (tmp_path / "state.pt").exists() == (not ahead)


def test_a_step_on_another_stream_is_trained_and_not_kept(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events say nothing about the stream of the points."""

    def train() -> None:
        _, rank = at_a_point(monkeypatch)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: object())
        queue_step(rank)
        with pytest.raises(NotCleanError, match="more than one stream"):
            rank.session.writer.hold(0, iter([True] * 500 + [False] * 5).__next__)

    within(train)


def test_two_threads_copy_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training may make a copy while the thread of a survivor writes the state."""
    simulate_gpu(monkeypatch)
    copies = GpuCopies(torch.device("cpu"))
    tensors = [torch.full((1 << 20,), float(number)) for number in range(8)]
    found: list[bool] = []

    def copy(own: list[torch.Tensor]) -> None:
        for _ in range(20):
            copied = copies.copied(own)
            found.append(all(torch.equal(copied[key_of(each)], each) for each in own))

    threads = [threading.Thread(target=copy, args=(tensors[n::2],)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 40


def test_weights_that_an_evaluation_swaps_on_a_gpu_are_not_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train() -> None:
        gpu, rank = at_a_point(monkeypatch)
        rank.model[0].weight.data.sum()
        rank.step()
        rank.report()
        gpu.work_off()
        rank.model[0].weight.data.mul_(0.5)
        with pytest.raises(NotCleanError, match="changed after the step"):
            rank.write(tmp_path)

    within(train)


def test_a_state_that_the_gpu_leaves_while_it_is_copied_is_not_written(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An aborted collective lets the GPU go on, with gradients that are torn."""

    def train() -> None:
        gpu, rank = at_a_point(monkeypatch)
        queue_step(rank)
        copied = GpuCopies.copied

        def copied_late(*arguments: Any) -> Any:
            gpu.work_off()
            return copied(*arguments)

        monkeypatch.setattr(GpuCopies, "copied", copied_late)
        with pytest.raises(NotCleanError, match="began the next step while its state was copied"):
            rank.write(tmp_path)

    within(train)


@pytest.mark.parametrize("has_arrived", [True, False])
def test_statistics_of_a_lost_rank_count_if_its_gpu_had_written_them(
    within: Within, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_arrived: bool
) -> None:
    def train() -> None:
        gpu = simulate_gpu(monkeypatch)
        lost = Rank(monkeypatch)
        gpu.work_off()
        lost.forward(1.0)
        if has_arrived:
            gpu.work_off()
        gpu.lose()
        rank = Rank(monkeypatch)
        rank.step()
        rank.report()
        gpu.work_off()
        monkeypatch.setattr(point_writer, "get_context", lambda: World(2))
        if has_arrived:
            rank.write(tmp_path, lost=lost)
            states = torch.load(tmp_path / "own-1.pt")["parts"]["model"]
            name = "1.running_mean"
            assert torch.equal(states[name], lost.model.state_dict()[name])
        else:
            with pytest.raises(NotCleanError, match="its random numbers aren't known"):
                rank.write(tmp_path, lost=lost)

    within(train)
