"""A run with virtual workers that is killed and resized ends as one that wasn't."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.journals import journal
from tests.sweeps import only_in_sweep

from polytrain import (
    FailureConfig,
    InvalidJobError,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)

EPOCHS, BATCHES = 2, 5
ROWS = 16 * BATCHES - 7


def train(config: dict[str, Any]) -> None:
    """Dies at the step that a file says, before it reports it; or waits at one to be resized."""
    import torch

    from polytrain import checkpoint_requested, get_context, get_dataset_shard
    from polytrain.torch import TrainingState, micro_batches, prepare_model

    torch.manual_seed(1)
    model = prepare_model(
        torch.nn.Sequential(
            torch.nn.Linear(12, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(16, 1),
        )
    )
    averaged = torch.optim.swa_utils.AveragedModel(model.module)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES)
    parts = {"model": model, "averaged": averaged, "optimizer": optimizer}
    state = TrainingState(**parts, scheduler=scheduler)
    done = state.restore()
    step, end = done.get("step", 0), int(Path(config["end"]).read_text())
    context = get_context()
    waits = config["waits"].get(context.get_world_size())
    shard = get_dataset_shard()
    for epoch in range(done.get("epoch", 0), EPOCHS):
        for batch in shard.iter_torch_batches(global_batch_size=16, dtypes=torch.float32):
            step += 1
            optimizer.zero_grad()
            for part in micro_batches(batch):
                loss = torch.nn.functional.mse_loss(model(part["x"])[:, 0], part["y"])
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            averaged.update_parameters(model.module)
            if context.get_world_rank() == 0:
                if step == end:
                    os.kill(os.getpid(), signal.SIGKILL)
                while step == waits and not checkpoint_requested():
                    time.sleep(0.005)
            state.report(
                {"loss": loss, "norm": norm, "draw": torch.rand(())}, step=step, epoch=epoch
            )


def fit(
    path: Path,
    workers: int | tuple[int, int],
    *,
    end: int = -1,
    virtual: int | None = 4,
    function: Any = train,
    progress: Any = False,
    cluster: str = "local",
    waits: Mapping[int, int] | None = None,
    observers: tuple[Any, ...] = (),
    by: str = "",
    **options: Any,
) -> Result:
    path.mkdir(exist_ok=True)
    (path / "end").write_text(str(end))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 12), dtype=np.float32)
    return make_trainer(
        "torch",
        function,
        train_loop_config={"end": str(path / "end"), "waits": waits or {}, "by": by},
        datasets={"train": {"x": list(x), "y": x.sum(1)}},
        scaling_config=ScalingConfig(num_workers=workers, virtual_workers=virtual, cluster=cluster),
        run_config=RunConfig(
            storage_path=path,
            name="run",
            progress=progress,
            observers=observers,
            failure_config=FailureConfig(max_failures=0),
        ),
        **options,
    ).fit()


def metrics_of(report: Mapping[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in ("loss", "norm", "draw") if name in report}


def test_kills_and_other_numbers_of_workers_change_no_bit(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 1)
    for workers, end in ((4, 4), (2, 6), (3, 9)):
        with pytest.raises(TrainingFailedError):
            fit(tmp_path / "cut", workers, end=end)
        for virtual in (8, None):
            with pytest.raises(InvalidJobError, match=r"Give virtual_workers=4") as caught:
                fit(tmp_path / "cut", workers, virtual=virtual)
            assert [each.field for each in caught.value.problems] == [
                "ScalingConfig.virtual_workers"
            ]
    asked = journal(tmp_path / "cut" / "run", "SurvivorsAsked")
    # Each was killed before it reported its step, whose metrics only virtual worker 0 has.
    assert all("no other rank has virtual worker 0's metrics" in each["reason"] for each in asked)
    assert len(asked) == 3
    cut = fit(tmp_path / "cut", 1)
    assert (whole.why_not_exact, cut.why_not_exact) == ((), ())
    assert [metrics_of(each) for each in cut.history] == [
        metrics_of(each) for each in whole.history
    ]
    assert len(whole.history) == EPOCHS * BATCHES
    with pytest.raises(InvalidJobError, match=r"restore_from was made with 4 .* virtual_workers=4"):
        fit(tmp_path / "other", 1, virtual=2, restore_from=whole.checkpoint)
    weights = whole.load_model()
    assert all(value.equal(weights[name]) for name, value in cut.load_model().items())


def train_and_report_epochs(config: dict[str, Any]) -> None:
    """Rank `rank` is killed at a place of a step, counted from 1, in the first attempt."""
    import random

    import torch

    from polytrain import get_context
    from polytrain.torch import TrainingState, micro_batches, prepare_data_loader, prepare_model
    from polytrain_torch.virtual_workers import gradients as virtual_gradients

    if config["sockets"]:
        # As on several nodes: no memory is shared, and sums begin in the backward pass.
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        virtual_gradients._BUCKET = 64
    torch.manual_seed(1)
    inner = torch.nn.Sequential(
        torch.nn.Linear(12, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(16, 1),
    )
    model = prepare_model(inner)
    averaged = torch.optim.swa_utils.AveragedModel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES)
    x = torch.arange(12.0 * ROWS).reshape(ROWS, 12) / ROWS
    loader = prepare_data_loader(
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, x.sum(1)), batch_size=4, shuffle=True
        )
    )
    parts = {"model": model, "averaged": averaged, "optimizer": optimizer}
    state = TrainingState(**parts, scheduler=scheduler)
    done = state.restore()
    context = get_context()
    is_killed = context.get_attempt() == 0 and context.get_world_rank() == config["rank"]

    class Steps:
        taken = 0

    def at(place: str) -> None:
        Steps.taken += place == "begin"
        if is_killed and (place, Steps.taken) == (config["place"], config["step"]):
            os.kill(os.getpid(), signal.SIGKILL)

    inner[1].weight.register_post_accumulate_grad_hook(lambda _: at("within backward"))
    for epoch in range(done.get("epoch", 0), EPOCHS):
        for batch in loader:
            at("begin")
            optimizer.zero_grad()
            noise = 1 + 0.1 * random.random()
            for rows, sums in micro_batches(batch):
                loss = torch.nn.functional.mse_loss(model(rows)[:, 0], noise * sums)
                loss.backward()
                at("backward")
            optimizer.step()
            at("step")
            scheduler.step()
            averaged.update_parameters(inner)
        state.report({"loss": loss, "draw": torch.rand(())}, epoch=epoch + 1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit_epochs(tmp_path_factory.mktemp("undisturbed"), 1)


def fit_epochs(path: Path, workers: int, **config: Any) -> Result:
    return make_trainer(
        "torch",
        train_and_report_epochs,
        train_loop_config={"rank": -1, "place": "", "step": 0, "sockets": False} | config,
        scaling_config=ScalingConfig(num_workers=workers, virtual_workers=4, cluster="local"),
        run_config=RunConfig(
            storage_path=path, progress=False, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("workers", "rank", "place", "step", "sockets"),
    [
        only_in_sweep(2, 1, "begin", 3, False),
        only_in_sweep(3, 0, "backward", 4, False),
        only_in_sweep(4, 2, "step", BATCHES, False),
        (3, 0, "step", BATCHES + 3, False),
        (4, 1, "within backward", 4, True),
    ],
)
def test_the_loss_of_a_rank_costs_no_step_and_changes_no_bit(
    tmp_path: Path,
    undisturbed: Result,
    workers: int,
    rank: int,
    place: str,
    step: int,
    sockets: bool,
) -> None:
    result = fit_epochs(tmp_path, workers, rank=rank, place=place, step=step, sockets=sockets)
    [asked] = journal(result.path, "SurvivorsAsked")
    assert (result.restarts, asked["reason"]) == (1, "")
    assert [metrics_of(each) for each in result.history] == [
        metrics_of(each) for each in undisturbed.history
    ]
    weights = undisturbed.load_model()
    assert all(value.equal(weights[name]) for name, value in result.load_model().items())


def turns_deterministic_algorithms_off(config: dict[str, Any]) -> None:
    import torch

    torch.use_deterministic_algorithms(False)
    train(config)


def reads_the_number_of_workers(config: dict[str, Any]) -> None:
    import torch

    from polytrain import get_context, get_dataset_shard
    from polytrain.torch import TrainingState, micro_batches, prepare_model

    model = prepare_model(torch.nn.Linear(12, 1))
    for batch in get_dataset_shard().iter_torch_batches(batch_size=4, dtypes=torch.float32):
        for part in micro_batches(batch):
            loss = model(part["x"]).mean() / torch.distributed.get_world_size()
            loss = loss * get_context().get_world_size()
            loss.backward()
    with torch.no_grad():
        torch.distributed.all_reduce(loss)
    TrainingState(model=model).report({"loss": loss})


def test_a_loss_that_reads_the_number_of_workers_is_told(tmp_path: Path) -> None:
    result = fit(tmp_path, 2, function=reads_the_number_of_workers)
    assert result.why_not_exact == tuple(
        f"the loop over micro_batches(…) calls {name}.get_world_size, whose result depends on the "
        "number of workers"
        for name in ("torch.distributed", "Context")
    )


def divides_the_batch_by_workers(config: dict[str, Any]) -> None:
    import torch

    from polytrain import get_context, get_dataset_shard
    from polytrain.torch import TrainingState, micro_batches, prepare_data_loader, prepare_model

    rows = 8 // get_context().get_world_size()
    model = prepare_model(torch.nn.Linear(12, 1))
    state = TrainingState(model=model)
    state.restore()
    data = torch.utils.data.TensorDataset(torch.ones(ROWS, 12))
    loader = prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=rows))
    for batch in loader:
        for (x,) in micro_batches(batch):
            model(x).mean().backward()
    for batch in get_dataset_shard().iter_torch_batches(batch_size=rows, dtypes=torch.float32):
        for part in micro_batches(batch):
            model(part["x"]).mean().backward()
    model.zero_grad()
    state.report({})


def test_batches_that_depend_on_the_number_of_workers_are_told(tmp_path: Path) -> None:
    first = fit(tmp_path / "first", 2, function=divides_the_batch_by_workers)
    assert first.why_not_exact == ()
    second = fit(
        tmp_path / "second",
        1,
        function=divides_the_batch_by_workers,
        restore_from=first.checkpoint,
    )
    of_loader, of_shard = second.why_not_exact
    assert "had 4 rows on 2 workers, and have 8 on 1" in of_loader
    assert "batches of train had 4 rows on 2 workers, and have 8 on 1" in of_shard


def reports_before_it_steps(config: dict[str, Any]) -> None:
    import torch

    from polytrain import get_dataset_shard
    from polytrain.torch import TrainingState, micro_batches, prepare_model

    model = prepare_model(torch.nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state = TrainingState(model=model, optimizer=optimizer)
    state.restore()
    for batch in get_dataset_shard().iter_torch_batches(batch_size=4, dtypes=torch.float32):
        for part in micro_batches(batch):
            model(part["x"]).mean().backward()
    state.report({})
    optimizer.step()
    optimizer.zero_grad()


def test_gradients_that_a_checkpoint_lacks_are_told_by_what_starts_from_it(tmp_path: Path) -> None:
    first = fit(tmp_path / "first", 2, function=reports_before_it_steps)
    assert first.why_not_exact == ()
    start = first.checkpoint
    second = fit(tmp_path / "second", 2, function=reports_before_it_steps, restore_from=start)
    assert second.why_not_exact == (
        "a checkpoint was made between backward() and the optimizer's step, and lacks the "
        "gradients so far",
    )


def changes_parts_in_the_loop(config: dict[str, Any]) -> None:
    import copy

    import torch
    import torchmetrics

    from polytrain import get_dataset_shard
    from polytrain.torch import TrainingState, micro_batches, prepare_model

    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    inner = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.BatchNorm1d(12))
    inner.register_buffer("steps", torch.zeros(()))
    model, ema = prepare_model(inner), copy.deepcopy(inner)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    metric, in_loop, after = torchmetrics.MeanMetric(), Counter(), Counter()
    parts = {"model": model, "optimizer": optimizer, "metric": metric}
    state = TrainingState(**parts, ema=ema, in_loop=in_loop, after=after)
    for batch in get_dataset_shard().iter_torch_batches(batch_size=4, dtypes=torch.float32):
        optimizer.zero_grad()
        for part in micro_batches(batch):
            loss = model(part["x"]).square().mean()
            loss.backward()
            inner.steps += 1
            metric.update(loss)
            in_loop.count += 1
            for mine, its in zip(ema.parameters(), inner.parameters(), strict=True):
                mine.data.mul_(0.9).add_(its.data, alpha=0.1)
        optimizer.step()
        after.count += 1
    state.report({"loss": metric.compute(), "steps": inner.steps, "counted": after.count})


def steps_by_a_loss_of_the_loop(config: dict[str, Any]) -> None:
    import torch
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    from polytrain import get_dataset_shard
    from polytrain.torch import TrainingState, micro_batches, prepare_model

    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    schedule = ReduceLROnPlateau(optimizer, patience=100)
    for batch in get_dataset_shard().iter_torch_batches(batch_size=4, dtypes=torch.float32):
        optimizer.zero_grad()
        losses, total = [], None
        for part in micro_batches(batch):
            loss = model(part["x"]).square().mean()
            loss.backward()
            losses.append(loss.item())
            # Adds to the first loss in place.
            total = loss.detach() if total is None else total.add_(loss.detach())
        optimizer.step()
        mean = torch.tensor(losses).mean()
        total /= len(losses)
        values = {"tensor": loss, "number": loss.item(), "mean": mean, "mean in place": total}
        schedule.step(values[config["by"]])
    TrainingState(model=model, optimizer=optimizer).report({"loss": mean})


@pytest.mark.parametrize("by", ["tensor", "number", "mean", "mean in place"])
def test_a_schedule_by_one_micro_batchs_loss_is_named_on_one_worker(
    tmp_path: Path, by: str
) -> None:
    """On several workers the ranks' rates would differ, which is found."""
    result = fit(tmp_path, 1, function=steps_by_a_loss_of_the_loop, by=by)
    named = [why for why in result.why_not_exact if why.startswith("ReduceLROnPlateau.step gets")]
    assert len(named) == (by in ("tensor", "number"))


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(1), 2])
def test_what_the_loop_changes_in_the_training_state_is_told(tmp_path: Path, workers: int) -> None:
    result = fit(tmp_path, workers, function=changes_parts_in_the_loop)
    assert sorted(result.why_not_exact) == [
        f"{name!r} of TrainingState changes in the loop over micro_batches(…), whose length "
        "depends on the number of workers: change it after the loop"
        for name in ("ema", "in_loop")
    ]
    assert result.metrics["steps"] == result.metrics["counted"] == BATCHES


def test_a_run_says_why_it_is_not_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(tmp_path, 2, function=turns_deterministic_algorithms_off, progress=True)
    why_not = ("the training function has turned deterministic algorithms off",)
    assert result.why_not_exact == Result.from_path(result.path).why_not_exact == why_not
    said = f"xact over world sizes: no, {why_not[0]}"
    assert f"E{said}.</p>" in result.report(tmp_path / "page.html").read_text()
    assert f"  e{said}\n" in "".join(capsys.readouterr())
