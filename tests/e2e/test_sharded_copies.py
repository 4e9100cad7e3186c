"""Sharded state, of which each rank copies its own part: a loss costs the steps since the last.

The loop has what is hard to keep: BatchNorm, dropout, a scheduler, and evaluations, after which
FSDP doesn't give the model its shards back. Its checkpoints come at the ends of epochs, and there
is none before the first one ends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e import torch_runs
from tests.e2e.journals import journal
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep

from polytrain import CheckpointConfig, FailureConfig, Result, RunConfig, TrainingFailedError

EPOCHS, BATCHES = 3, 5


def train(config: dict[str, Any]) -> None:
    """Processes are killed in the first attempt, in a step that is counted from 1.

    If they have its gradients, all ranks have begun the step: they have copied the last one.
    """
    import errno
    import os
    import signal

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    import polytrain_torch

    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        torch.nn.Linear(3, 17),
        torch.nn.BatchNorm1d(17) if config["normalizes"] else torch.nn.Tanh(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(17, 1),
    )
    model = polytrain_torch.prepare_model(inner, parallel_strategy="fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    x = torch.arange(3.0 * 160).reshape(-1, 3) / 160
    loader = polytrain_torch.prepare_data_loader(
        DataLoader(TensorDataset(x, x.sum(1)), batch_size=16, shuffle=True)
    )
    polytrain_torch.seed_everything(7)
    context = polytrain.get_context()
    rank = context.get_world_rank()
    refuses = config["refuses"] if context.get_attempt() == 0 and rank == 1 else 0

    class Steps:
        """Counts what this attempt does; nothing that trains reads it."""

        begun = 0

    class Log:
        """A part that has no room on one rank, while the state after one step is copied."""

        def state_dict(self) -> dict[str, int]:
            if refuses and Steps.begun == refuses:
                raise OSError(errno.ENOSPC, "No space left on device")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    state = polytrain_torch.TrainingState(
        model=model, optimizer=optimizer, scheduler=scheduler, log=Log()
    )
    done = state.restore()

    def begin() -> None:
        Steps.begun += 1
        with open(config["steps"], "a") as file:
            file.write(f"{rank}\n")
        if not config["has_gradients"]:
            die()

    def die() -> None:
        if context.get_attempt() == 0 and Steps.begun == config["step"] and rank in config["ranks"]:
            os.kill(os.getpid(), signal.SIGKILL)

    for epoch in range(done.get("epoch", 0), 3):
        for x, y in loader:
            begin()
            optimizer.zero_grad()
            (model(x)[:, 0] - y).square().mean().backward()
            if config["has_gradients"]:
                die()
            optimizer.step()
            scheduler.step()
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        state.report({"rate": scheduler.get_last_lr()[0]}, epoch=epoch + 1)


def fit(
    quiet: RunConfig,
    path: Path,
    *,
    memory: Any = None,
    written_by: Any = "every_rank",
    max_failures: int = 1,
    changes: Any = None,
    **config: Any,
) -> tuple[Result, int]:
    """Train; return also how many steps the rank that is killed has begun.

    Others may be killed before or after they begin the same one.
    """
    steps = path / "steps"
    steps.unlink(missing_ok=True)
    result = torch_runs.fit(
        quiet,
        train,
        {
            "step": 0,
            "ranks": (),
            "has_gradients": False,
            "steps": str(steps),
            "normalizes": True,
            "refuses": 0,
            **config,
        },
        checkpoint_config=CheckpointConfig(memory=memory, written_by=written_by),
        failure_config=FailureConfig(max_failures=max_failures),
        **(changes or {}),
    )
    [rank, *_] = config.get("ranks", (0,))
    return result, steps.read_text().split().count(str(rank))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """Return the run without a loss, by who writes: rank 0 has statistics of its own."""

    @functools.cache
    def run(written_by: str) -> Result:
        path = tmp_path_factory.mktemp("undisturbed")
        return fit(RunConfig(storage_path=path, progress=False), path, written_by=written_by)[0]

    return run


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("memory", "step", "ranks", "again", "written_by"),
    [
        only_in_sweep(1, 4, (1,), 1, "every_rank"),
        (3, 9, (0,), 3, "every_rank"),
        (2, 14, (0, 1), 2, "every_rank"),
        only_in_sweep(2, 8, (1,), 2, "rank_0"),
        ("auto", 5, (1,), 2, "every_rank"),
    ],
)
def test_all_ranks_continue_from_the_newest_copy_of_which_all_have_a_part(
    quiet: RunConfig,
    undisturbed: Callable[[str], Result],
    tmp_path: Path,
    memory: int | str,
    step: int,
    ranks: tuple[int, ...],
    again: int,
    written_by: str,
) -> None:
    result, steps = fit(
        quiet, tmp_path, memory=memory, step=step, ranks=ranks, written_by=written_by
    )
    assert result.restarts == 1
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    expected = undisturbed(written_by)
    assert equal(result.load_model(), expected.load_model())
    assert result.history == expected.history
    # The step that wasn't finished is begun again.
    assert EPOCHS * BATCHES < steps <= EPOCHS * BATCHES + again + 1


def test_a_copy_that_one_rank_can_not_make_leaves_the_one_before_to_all(
    quiet: RunConfig, undisturbed: Callable[[str], Result], tmp_path: Path
) -> None:
    """Rank 1 has no room after step 3, and is killed in step 5: all have copies of step 2."""
    result, steps = fit(quiet, tmp_path, memory=1, step=5, ranks=(1,), refuses=3)
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert equal(result.load_model(), undisturbed("every_rank").load_model())
    assert steps == EPOCHS * BATCHES + 3
    logged = "".join(each.read_text() for each in Path(result.path, "logs").iterdir())
    assert "keeps no copies of the training's state" in logged
    assert "No space left on device" in logged


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(1), 3])
def test_another_number_of_workers_resumes_from_copies(
    quiet: RunConfig, tmp_path: Path, workers: int
) -> None:
    """Two took three steps of 32 rows; the others take the 64 that are left of the epoch."""
    dies: dict[str, Any] = {"step": 4, "ranks": (1,), "has_gradients": True, "max_failures": 0}
    with pytest.raises(TrainingFailedError) as lost:
        fit(quiet, tmp_path, memory=1, normalizes=False, **dies)
    assert lost.value.path is not None
    newest = Result.from_path(lost.value.path).checkpoint
    changes = {"workers": workers, "restore_from": newest, "name": f"on {workers}"}
    result, _ = fit(quiet, tmp_path, changes=changes, normalizes=False)
    steps = -(-64 // (16 * workers)) + 2 * -(-160 // (16 * workers))
    assert result.metrics["rate"] == pytest.approx(0.01 * 0.99 ** (3 + steps))


def test_without_copies_the_run_resumes_from_its_checkpoint(
    quiet: RunConfig, undisturbed: Callable[[str], Result], tmp_path: Path
) -> None:
    result, steps = fit(quiet, tmp_path, step=9, ranks=(1,))
    assert equal(result.load_model(), undisturbed("every_rank").load_model())
    assert steps == EPOCHS * BATCHES + 4


def report_after_the_loop(config: dict[str, Any]) -> None:
    """The report has a variable of the loop, which an epoch without a batch wouldn't set."""
    import os
    import signal

    import torch

    import polytrain
    import polytrain_torch

    torch.manual_seed(0)
    model = polytrain_torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = polytrain_torch.TrainingState(model=model, optimizer=optimizer)
    done = state.restore()
    shard = polytrain.get_dataset_shard("train")
    is_first = polytrain.get_context().get_attempt() == 0
    for epoch in range(done.get("epoch", 0), EPOCHS):
        for batch in shard.iter_torch_batches(global_batch_size=8, dtypes=torch.float32):
            loss = (model(batch["x"][:, None])[:, 0] - batch["y"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if config["dies"] and is_first and epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.report({"loss": loss}, epoch=epoch + 1)


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(1), 2])
def test_a_loss_after_the_last_batch_of_an_epoch_repeats_what_the_report_needs(
    quiet: RunConfig, workers: int
) -> None:
    x = np.arange(40.0) / 40
    uncut, cut = (
        torch_runs.fit(
            dataclasses.replace(quiet, name=name),
            report_after_the_loop,
            {"dies": name == "cut"},
            workers=workers,
            datasets={"train": {"x": x, "y": 2 * x}},
            checkpoint_config=CheckpointConfig(memory=1),
        )
        for name in ("uncut", "cut")
    )
    [asked] = journal(cut.path, "SurvivorsAsked")
    assert (asked["reason"], asked["step"]) == ("", 1)
    assert equal(cut.load_model(), uncut.load_model())
    assert [each["loss"] for each in cut.history] == [each["loss"] for each in uncut.history]
