"""On GPUs too, a loss costs no step while another rank is left, or a copy of the state.

Two ranks that share a GPU are joined by gloo, which waits on the CPU. A collective of NCCL's waits
on the GPU, and the training runs ahead of it: here a kernel that only waits stands for it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tests.plugin_torch.kept_ranks import Session, state_of, written

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    make_trainer,
)
from polytrain.extension import NotCleanError

STEPS = 3 * 5


def train(config: dict[str, Any]) -> None:
    """Ranks fail at a place of a step, counted from 1, in the first attempt."""
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from torch.utils.data import DataLoader, TensorDataset

    from polytrain import get_context
    from polytrain.torch import (
        TrainingState,
        get_device,
        prepare_data_loader,
        prepare_model,
        seed_everything,
    )

    torch.manual_seed(0)
    device = get_device()
    inner = torch.nn.Sequential(
        torch.nn.Linear(3, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 1),
    )
    model = prepare_model(inner, parallel_strategy=config["strategy"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=config["fused"])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    x = torch.arange(3.0 * 160).reshape(-1, 3) / 160
    loader = prepare_data_loader(
        DataLoader(TensorDataset(x, x.sum(1)), batch_size=32 // config["ranks"], shuffle=True)
    )
    seed_everything(7)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if config["strategy"] == "ddp":
        average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        parts["average"] = average
    state = TrainingState(**parts)
    done = state.restore()
    context = get_context()
    fails = context.get_attempt() == 0 and config["rank"] in (context.get_world_rank(), "all")

    class Steps:
        """Counts what this attempt does; nothing that trains reads it."""

        begun = 0

    def at(place: str) -> None:
        Steps.begun += place == "begin"
        if fails and (place, Steps.begun) == (config["place"], config["step"]):
            if place == "step":
                torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)

    for epoch in range(done.get("epoch", 0), 3):
        for rows, sums in loader:
            at("begin")
            optimizer.zero_grad()
            noise = 1 + 0.1 * torch.rand((), device=device)
            loss = (model(rows)[:, 0] - noise * sums).square().mean()
            at("forward")
            loss.backward()
            at("backward")
            optimizer.step()
            with Path(config["notes"]).open("a") as file:
                file.write(f"{context.get_world_rank()}\n")
            at("step")
            scheduler.step()
            if config["strategy"] == "ddp":
                average.update_parameters(inner)
        state.report({"rate": scheduler.get_last_lr()[0], "device": device.type}, epoch=epoch + 1)
        at("report")


def fit(
    path: Path,
    ranks: int,
    group: str,
    *,
    place: str = "",
    step: int = 0,
    rank: int | str = 1,
    strategy: str = "ddp",
    fused: bool = False,
    memory: int | None = None,
) -> Result:
    config = {"place": place, "step": step, "rank": rank, "strategy": strategy, "fused": fused}
    path.mkdir(parents=True, exist_ok=True)
    result = make_trainer(
        "torch",
        train,
        train_loop_config={**config, "ranks": ranks, "notes": str(path / "steps")},
        process_group=group,
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=True, cluster="local"),
        run_config=RunConfig(
            storage_path=path,
            name="run",
            progress=False,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(memory=memory),
        ),
    ).fit()
    assert {each["device"] for each in result.history} == {"cuda"}
    assert result.restarts == (1 if place else 0)
    return result


def steps_of(path: Path) -> int:
    return len((path / "steps").read_text().split())


def asked(result: Result) -> str:
    """Why no survivor had the state; empty if one had it."""
    lines = map(json.loads, Path(result.path, "journal.jsonl").read_text().splitlines())
    [event] = [line for line in lines if line["event"] == "SurvivorsAsked"]
    return str(event["reason"])


def expect_equal(one: Result, other: Result) -> None:
    import torch

    weights, others = one.load_model(), other.load_model()
    assert weights.keys() == others.keys()
    different = [name for name in weights if not torch.equal(weights[name], others[name])]
    assert not different
    assert one.history == other.history


@pytest.mark.parametrize("fused", [False, True])
def test_no_step_is_repeated_if_a_rank_is_left(
    tmp_path: Path, share_gpu: Callable[[int], None], fused: bool
) -> None:
    share_gpu(2)
    undisturbed = fit(tmp_path / "undisturbed", 2, "gloo", fused=fused)
    for place, step, rank in (("forward", 3, 1), ("step", 8, 0), ("begin", 12, 1)):
        path = tmp_path / f"{place} {step}"
        result = fit(path, 2, "gloo", place=place, step=step, rank=rank, fused=fused)
        assert asked(result) == "", (place, asked(result))
        expect_equal(result, undisturbed)
        # At most the rank that was killed after its step takes no part in noting it.
        assert steps_of(path) == 2 * STEPS


@pytest.mark.parametrize(
    ("ranks", "group", "strategy"), [(2, "gloo", "ddp"), (1, "nccl", "ddp"), (1, "nccl", "fsdp")]
)
def test_copies_serve_if_no_rank_is_left(
    tmp_path: Path, share_gpu: Callable[[int], None], ranks: int, group: str, strategy: str
) -> None:
    share_gpu(ranks)
    undisturbed = fit(tmp_path / "undisturbed", ranks, group, strategy=strategy)
    result = fit(
        tmp_path / "killed",
        ranks,
        group,
        place="forward",
        step=8,
        rank="all",
        strategy=strategy,
        memory=1,
    )
    expect_equal(result, undisturbed)
    assert steps_of(tmp_path / "killed") == ranks * STEPS


class Rank:
    """Trains on the GPU, and tells its keeper of it as hooks and loaders do."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, layers: int = 2, fused: bool = False
    ) -> None:
        import torch

        from polytrain_torch.survivors import keeper

        torch.manual_seed(1)
        self.session = Session()
        monkeypatch.setattr(keeper, "survivor", lambda: self.session)
        blocks = [(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256)) for _ in range(layers)]
        self.model = torch.nn.Sequential(*chain.from_iterable(blocks)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused)
        self.keeper = keeper.Keeper({"model": self.model, "optimizer": self.optimizer}, {})
        self.rows = torch.randn(64, 256, device="cuda")
        self.keeper.before_batch(sys._getframe(1))

    def step(self) -> None:
        self.model(self.rows).square().mean().backward()
        self.keeper.after_forward()
        self.keeper.before_step(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def report(self) -> None:
        self.keeper.at_report({"loss": 1.0}, {"epoch": 1})

    def states(self) -> tuple[Any, ...]:
        assert self.session.kept is not None
        return self.session.kept.read()

    def write(self, directory: Path, *, within_s: float = 5.0) -> None:
        until = time.monotonic() + within_s
        point = self.session.writer.hold(0, lambda: time.monotonic() < until)
        directory.mkdir()
        self.session.writer.write({0: self.states()}, point, directory)

    def close(self) -> None:
        """Let another rank of this process share memory at the same address with the GPU."""
        import torch

        torch.cuda.synchronize()
        assert self.session.kept is not None
        memory = torch.frombuffer(self.session.kept.memory, dtype=torch.uint8)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def within(path: Path, function: Callable[[], None]) -> None:
    """Run a function as a training function of one worker, in this process."""
    make_trainer(
        "torch",
        lambda: function(),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=path, progress=False),
    ).fit()


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_gpu_that_waits_for_a_lost_rank_has_the_state_before_the_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Callable[[str, str], None],
    ahead: int,
    fused: bool,
) -> None:
    """The CPU has queued steps after it."""
    import torch

    def wait_on_gpu() -> None:
        torch.cuda._sleep(int(6e9))  # some three seconds

    def expect_state() -> None:
        rank = Rank(monkeypatch, fused=fused)
        rank.report()
        for _ in range(3):
            rank.step()
            rank.report()
        torch.cuda.synchronize()
        expected = state_of(rank.model, rank.optimizer)
        for _ in range(ahead):
            # In place of a collective that a lost rank should have joined.
            rank.model[0].weight.register_post_accumulate_grad_hook(lambda _: wait_on_gpu())
            rank.step()
            rank.report()
        began = time.monotonic()
        rank.write(tmp_path / "written")
        took = time.monotonic() - began
        found = written(tmp_path / "written")
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        if ahead:
            still = not torch.cuda.current_stream().query()
            assert still, "the GPU didn't wait any more"
        figure(f"a state written with {ahead} steps queued", f"{took:.3f} s")
        rank.close()

    within(tmp_path, expect_state)


def test_a_gpu_that_is_inside_of_a_step_has_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def expect_none() -> None:
        rank = Rank(monkeypatch)
        rank.report()
        rank.step()
        rank.report()
        rank.model(rank.rows).square().mean().backward()
        rank.keeper.before_step(rank.optimizer)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(4e9))
        rank.optimizer.step()
        with pytest.raises(NotCleanError, match="inside of an optimizer's step"):
            rank.write(tmp_path / "written", within_s=0.5)
        rank.close()

    within(tmp_path, expect_none)


@pytest.mark.alone
def test_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str, str], None]
) -> None:
    """CPU time of the keeper in a step; the GPU's part of it goes on beside the forward pass."""
    import torch

    def measure() -> None:
        rank = Rank(monkeypatch, layers=40)
        frame = sys._getframe()
        times: dict[str, list[float]] = {"before": [], "forward": [], "step": [], "whole": []}
        for number in range(120):
            begin = time.perf_counter()
            rank.keeper.before_batch(frame)
            fetched = time.perf_counter()
            rank.model(rank.rows).square().mean().backward()
            computed = time.perf_counter()
            rank.keeper.after_forward()
            foretold = time.perf_counter()
            rank.keeper.before_step(rank.optimizer)
            noted = time.perf_counter()
            rank.optimizer.step()
            rank.optimizer.zero_grad()
            torch.cuda.synchronize()
            if number >= 20:
                times["before"].append(fetched - begin)
                times["forward"].append(foretold - computed)
                times["step"].append(noted - foretold)
                times["whole"].append(time.perf_counter() - begin)
        medians = {name: statistics.median(each) * 1e6 for name, each in times.items()}
        figure(
            "kept at each step, of 160 parameters and 120 buffers",
            ", ".join(f"{name} {value:.0f} µs" for name, value in medians.items()),
        )

    within(tmp_path, measure)
