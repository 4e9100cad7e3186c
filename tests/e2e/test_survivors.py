"""A loss costs no step: the ranks that are left have the state of the last one.

The loop has what is hard to keep: BatchNorm, dropout, a scheduler, an average of the weights, and
gradients that add up over two batches. Its first checkpoint comes at the end of its first epoch, so
a run that begins an attempt between two epochs has it from a survivor.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import torch_runs
from tests.e2e.journals import journal
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep

from polytrain import CheckpointConfig, FailureConfig, Result, RunConfig, TrainingFailedError

NOTHING: dict[str, Any] = {}


def train(config: dict[str, Any]) -> None:
    """Rank `rank` fails at a place of a step, counted from 1, in the first attempt."""
    import os
    import random
    import signal
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    import polytrain_torch
    from polytrain_torch.checkpoints import training_state

    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        torch.nn.Linear(3, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 1),
    )
    chosen = {"process_group": dist.group.WORLD} if config["by"] == "gloo" else {}
    model = polytrain_torch.prepare_model(inner, parallel_strategy_kwargs=chosen)
    average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    x = torch.arange(3.0 * 160).reshape(-1, 3) / 160
    loader = polytrain_torch.prepare_data_loader(
        DataLoader(TensorDataset(x, x.sum(1)), batch_size=16, shuffle=True)
    )
    held_out = TensorDataset(x)
    other = polytrain_torch.prepare_data_loader(DataLoader(held_out, batch_size=16))
    polytrain_torch.seed_everything(7)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if config["averages"]:
        # Its buffers are each rank's own.
        parts["average"] = average
    state = polytrain_torch.TrainingState(**parts)
    done = state.restore()
    context = polytrain.get_context()
    rank = context.get_world_rank()
    fails = context.get_attempt() == 0 and config["rank"] in (rank, "all")

    class Steps:
        """Counts what this attempt does; nothing that trains reads it."""

        taken = 0

    def whole() -> None:
        if config["steps"]:
            with Path(config["steps"]).open("a") as file:
                file.write(f"{context.get_attempt()}\n")

    def at(place: str) -> None:
        Steps.taken += place == "begin"
        if fails and (place, Steps.taken) == (config["place"], config["step"]):
            if config["raises"]:
                raise RuntimeError("this rank's own error")
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluate() -> None:
        """Evaluate without a collective."""
        inner.eval()
        with torch.no_grad():
            # Torch's loader draws a random number of the training's.
            for (rows,) in DataLoader(held_out, batch_size=16):
                inner(rows)
        inner.train()
        if fails:
            meet()
        at("evaluated")

    def meet() -> None:
        """Have the rank that fails wait until the other one is within its report."""
        if (context.get_attempt(), Steps.taken, config["place"]) == (
            0,
            config["step"],
            "evaluated",
        ):
            with Path(config["evaluates"]).open("r" if fails else "w") as meeting:
                _ = meeting.read() if fails else meeting.write("here")

    own_agreement = training_state.agree_on_call

    def agree_on_call(*given: Any) -> None:
        meet()
        own_agreement(*given)

    training_state.agree_on_call = agree_on_call
    register_optimizer_step_post_hook(lambda *_: at("optimizer"))
    if config["looks"]:
        next(iter(loader))
        for _ in other:
            pass
        for _ in loader:
            break
        held = iter(loader)
        next(held)
    for epoch in range(done.get("epoch", 0), 3):
        for x, y in loader:
            at("begin")
            noise = 1 + 0.1 * random.random()
            optimizer.zero_grad()
            for half in (0, 1):
                loss = (model(x[half::2])[:, 0] - noise * y[half::2]).square().mean() / 2
                at("forward")
                loss.backward()
            at("backward")
            optimizer.step()
            whole()
            at("step")
            scheduler.step()
            if config["averages"]:
                average.update_parameters(inner)
        if config["evaluates"]:
            evaluate()
        state.report({"rate": scheduler.get_last_lr()[0]}, epoch=epoch + 1)
        at("report")


def fit(
    quiet: RunConfig,
    place: str = "",
    step: int = 0,
    changes: dict[str, Any] = NOTHING,
    max_failures: int = 1,
    **config: Any,
) -> Result:
    chosen = {"place": place, "step": step, "rank": 1, "by": "", "raises": False}
    chosen |= {"looks": False, "averages": True, "steps": None, "evaluates": None, **config}
    failures = FailureConfig(max_failures=max_failures, retry_user_errors=True)
    return torch_runs.fit(quiet, train, chosen, failure_config=failures, **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    run = RunConfig(storage_path=tmp_path_factory.mktemp("undisturbed"), progress=False)
    return fit(run)


@pytest.mark.parametrize(
    ("place", "step", "config"),
    [
        ("forward", 3, {}),
        ("optimizer", 4, {"rank": 0}),
        ("step", 5, {"by": "gloo"}),
        ("step", 8, {"rank": 0, "by": "gloo"}),
        ("begin", 7, {"raises": True}),
    ],
)
def test_no_step_is_repeated(
    quiet: RunConfig, undisturbed: Result, place: str, step: int, config: dict[str, Any]
) -> None:
    result = fit(quiet, place, step, **config)
    assert result.restarts == 1
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    [_, again] = journal(result.path, "Launched")
    assert again["start"] is not None
    assert again["step"] == asked["step"]
    assert equal(result.load_model(), undisturbed.load_model())
    rates = [each["rate"] for each in result.history if "rate" in each]
    assert rates == [each["rate"] for each in undisturbed.history if "rate" in each]
    assert Path(again["start"]).name.startswith("checkpoint_")


def test_no_step_is_repeated_after_looks_at_batches(quiet: RunConfig, tmp_path: Path) -> None:
    expected = fit(replace(quiet, storage_path=tmp_path / "undisturbed"), looks=True)
    result = fit(quiet, "forward", 8, looks=True)
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert result.restarts == 1
    assert equal(result.load_model(), expected.load_model())


def test_no_step_is_repeated_if_only_one_rank_has_evaluated(
    quiet: RunConfig, tmp_path: Path
) -> None:
    """The other one reports already. It can't know what random numbers the lost one has drawn."""
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)
    chosen = {"evaluates": str(meeting)}
    expected = fit(replace(quiet, storage_path=tmp_path / "undisturbed"), **chosen)
    result = fit(quiet, "evaluated", 10, **chosen)
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert result.restarts == 1
    assert equal(result.load_model(), expected.load_model())
    assert result.history == expected.history


ALONE = {"workers": 1, "checkpoint_config": CheckpointConfig(memory=1)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    run = RunConfig(storage_path=tmp_path_factory.mktemp("alone"), progress=False)
    return fit(run, changes=ALONE | {"checkpoint_config": CheckpointConfig()})


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "step", "again", "config"),
    [
        only_in_sweep("forward", 3, 0, {}),
        ("step", 8, 1, {}),
        only_in_sweep("report", 10, 0, {}),
        only_in_sweep("optimizer", 17, 0, {}),
        ("begin", 27, 0, {"raises": True}),
    ],
)
def test_a_worker_without_peers_continues_from_its_copy(
    quiet: RunConfig,
    alone: Result,
    tmp_path: Path,
    place: str,
    step: int,
    again: int,
    config: dict[str, Any],
) -> None:
    """Only a step that was taken after the copy of the one before is taken again."""
    steps = tmp_path / "steps"
    result = fit(quiet, place, step, ALONE, rank=0, steps=str(steps), **config)
    assert result.restarts == 1
    assert equal(result.load_model(), alone.load_model())
    assert result.history == alone.history
    assert 0 == alone.ledger.seconds["snapshot"] < result.ledger.seconds["snapshot"]
    assert len(steps.read_text().split()) == 30 + again


COPIED = {"checkpoint_config": CheckpointConfig(memory=1)}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "step", "again"),
    [only_in_sweep("forward", 3, 0), only_in_sweep("begin", 8, 0), ("optimizer", 14, 0)],
)
def test_if_all_ranks_are_lost_at_once_they_continue_from_their_copies(
    quiet: RunConfig, undisturbed: Result, tmp_path: Path, place: str, step: int, again: int
) -> None:
    steps = tmp_path / "steps"
    result = fit(quiet, place, step, COPIED, rank="all", steps=str(steps))
    assert result.restarts == 1
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert equal(result.load_model(), undisturbed.load_model())
    assert result.history == undisturbed.history
    assert len(steps.read_text().split()) == 2 * (15 + again)


def test_another_number_of_workers_goes_on_from_it(quiet: RunConfig) -> None:
    """Two took two steps of 32 rows; three take the 96 rows that are left, 48 at a time."""
    with pytest.raises(TrainingFailedError) as lost:
        fit(quiet, "forward", 3, averages=False, max_failures=0)
    assert lost.value.path is not None
    newest = Result.from_path(lost.value.path).checkpoint
    changes = {"workers": 3, "restore_from": newest, "name": "on three"}
    result = fit(quiet, changes=changes, averages=False)
    assert len(result.history) == 3
    assert result.history[0]["rate"] == pytest.approx(0.01 * 0.99 ** (2 + 2))
