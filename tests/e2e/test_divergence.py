"""Training that diverges: the run goes back, leaves the bad batches out, and ends as without them.

Which reports are bad is decided in `tests/unit/policy/test_divergence.py`.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.e2e.journals import journal
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    FailureKind,
    InvalidJobError,
    Result,
    Rollback,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)

ROWS, BATCH, EPOCHS = 60, 8, 2
PER_EPOCH = -(-ROWS // BATCH)


def train(config: dict[str, Any]) -> None:
    """A linear model; batches with one of `left_out` are passed over by the loop itself."""
    from polytrain.torch import prepare_model

    torch.manual_seed(0)
    context, batches = polytrain.get_context(), batches_of(config["data"])
    model = prepare_model(torch.nn.Linear(3, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    first, trained = 0, []
    if (checkpoint := polytrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(f"{directory}/state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, trained = state["epoch"], state["trained"]
    for epoch in range(first, EPOCHS):
        for x, y, mine in batches():
            ids = gathered([int(each) for each in mine])
            if not config["left_out"].isdisjoint(ids):
                continue
            loss = ((model(x)[:, 0] - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trained = [*trained, sorted(ids)]
            dies = (context.get_attempt(), len(trained)) in config["dies"]
            if dies and context.get_world_rank() == context.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
                "trained": trained,
            }
            report({"loss": loss.item()}, state, saves=len(trained) % config["every"] == 0)


def batches_of(data: pd.DataFrame | None) -> Callable[[], Iterator[tuple[torch.Tensor, ...]]]:
    """Batches of the shard, or of a loader of the function's own if it gets the data."""
    if data is None:
        shard = polytrain.get_dataset_shard("train")

        def of_shard() -> Iterator[tuple[torch.Tensor, ...]]:
            sizes = {"global_batch_size": BATCH, "dtypes": torch.float64}
            for batch in shard.iter_torch_batches(**sizes):
                x = torch.stack([batch[name] for name in "abc"], dim=1)
                yield x, batch["y"], batch["id"]

        return of_shard
    from polytrain.torch import prepare_data_loader

    tensors = [torch.tensor(data[names].to_numpy()) for names in (list("abc"), "y", "id")]
    size = BATCH // polytrain.get_context().get_world_size()
    rows = torch.utils.data.TensorDataset(*tensors)
    loader = prepare_data_loader(torch.utils.data.DataLoader(rows, batch_size=size, shuffle=True))
    return lambda: iter(loader)


def gathered(ids: list[int]) -> list[int]:
    """The ids of all ranks."""
    world_size = torch.distributed.get_world_size()
    parts: list[list[int]] = [[]] * world_size
    torch.distributed.all_gather_object(parts, ids)
    return [each for part in parts for each in part]


def report(metrics: dict[str, float], state: dict[str, Any], *, saves: bool) -> None:
    import tempfile

    is_first = polytrain.get_context().get_world_rank() == 0
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if saves and is_first:
            torch.save(state, f"{directory}/state.pt")
            checkpoint = Checkpoint.from_directory(directory)
        polytrain.report(metrics, checkpoint=checkpoint)


def table(*, poisoned: set[int] = frozenset()) -> pd.DataFrame:  # type: ignore[assignment]
    random_numbers = np.random.default_rng(0)
    data = pd.DataFrame(random_numbers.normal(size=(ROWS, 3)), columns=list("abc"))
    data["y"] = data["a"] - 2 * data["b"]
    data["id"] = np.arange(ROWS)
    data.loc[sorted(poisoned), "a"] = np.nan
    return data


def fit(
    quiet: RunConfig,
    data: pd.DataFrame,
    *,
    workers: int,
    left_out: set[int] = frozenset(),  # type: ignore[assignment]
    dies: tuple[tuple[int, int], ...] = (),
    every: int = 1,
    shuffle: bool = True,
    by_loader: bool = False,
    **failures: Any,
) -> Result:
    return make_trainer(
        "torch",
        train,
        train_loop_config={
            "left_out": left_out,
            "dies": dies,
            "every": every,
            "data": data if by_loader else None,
        },
        datasets={} if by_loader else {"train": data},
        dataset_config={} if by_loader else {"train": DataConfig(shuffle=shuffle, seed=7)},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(**failures)),
    ).fit()


def state_of(result: Result) -> dict[str, Any]:
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        state: dict[str, Any] = torch.load(f"{directory}/state.pt", weights_only=True)
    return state


def assert_equal(one: Result, other: Result) -> None:
    """Bit for bit: the model, the optimizer, which rows were trained on, and what was reported."""
    ones, others = state_of(one), state_of(other)
    assert ones["trained"] == others["trained"]
    for name, tensor in ones["model"].items():
        assert torch.equal(tensor, others["model"][name])
    for number, state in ones["optimizer"]["state"].items():
        others_state = others["optimizer"]["state"][number]
        assert torch.equal(state["momentum_buffer"], others_state["momentum_buffer"])
    assert list(one.history) == list(other.history)


@pytest.mark.sweep
@pytest.mark.parametrize("number", [0, *map(only_in_sweep, range(1, 50))])
def test_the_run_ends_as_without_the_poisoned_batches(quiet: RunConfig, number: int) -> None:
    """1 to 3 poisoned rows, which are in other batches in each epoch; rank 1 is killed besides."""
    poisoned = {*random.Random(number).sample(range(ROWS), 1 + number % 3)}
    workers, every = 2 - number % 2, 1 + number % 4
    result = fit(
        quiet,
        table(poisoned=poisoned),
        workers=workers,
        every=every,
        dies=((0, 2), (1, 5), (2, 9)),
        on_divergence="rollback",
        max_rollbacks=2 * len(poisoned),
        max_failures=3,
    )
    reference = fit(quiet, table(), workers=workers, every=every, left_out=poisoned)
    assert_equal(result, reference)
    assert 2 <= len(result.rollbacks) <= 2 * len(poisoned)
    assert all("loss is nan" in rollback.reason for rollback in result.rollbacks)


def test_batches_of_a_prepared_loader_are_left_out(quiet: RunConfig) -> None:
    run = {"workers": 2, "by_loader": True, "every": 2}
    failures = {"on_divergence": "rollback", "max_failures": 1, "dies": ((1, 6),)}
    result = fit(quiet, table(poisoned={20}), **run, **failures)
    assert_equal(result, fit(quiet, table(), left_out={20}, **run))
    assert [[*rollback.skipped] for rollback in result.rollbacks] == [["data loader 0"]] * 2


def test_a_resume_with_another_number_of_workers_leaves_the_same_rows_out(
    quiet: RunConfig,
) -> None:
    """Two workers diverge and are stopped; one goes on, after the rows that were left out."""
    quiet = dataclasses.replace(quiet, name="run", stop={"training_iteration": 4})
    data, options = table(poisoned={10, 51}), {"on_divergence": "rollback", "shuffle": False}
    first = fit(quiet, data, workers=2, every=2, **options)
    assert [rollback.skipped for rollback in first.rollbacks] == [{"train": ((0, 8, 16),)}]
    more = dataclasses.replace(quiet, stop={"training_iteration": 8})
    second = fit(more, data, workers=1, every=2, **options)
    assert [rollback.skipped for rollback in second.rollbacks] == [
        {"train": ((0, 8, 16),)},
        {"train": ((0, 48, 56),)},
        {"train": ((1, 8, 16),)},
    ]
    batches = [[*range(n, min(n + 8, ROWS))] for n in range(0, ROWS, 8)]
    kept = [batch for batch in batches if not {10, 51} & {*batch}]
    assert state_of(second)["trained"] == [*kept, *batches[:1], *batches[2:3]][:8]
    assert Result.from_path(second.path).rollbacks == second.rollbacks


def test_a_checkpoint_of_a_bad_step_never_counts(quiet: RunConfig) -> None:
    """Rank 0 reports a checkpoint of the step at which rank 1 finds that training diverges."""
    quiet = dataclasses.replace(
        quiet,
        name="run",
        checkpoint_config=CheckpointConfig(num_to_keep=1, upload="sync"),
    )
    run = {"workers": 2, "shuffle": False, "on_divergence": "fail"}
    with pytest.raises(TrainingFailedError) as caught:
        # The second half of a global batch is rank 1's.
        fit(quiet, table(poisoned={23}), **run)
    error = caught.value
    assert error.reason == "on_divergence='fail'"
    assert (error.failures[0].kind, error.failures[0].rank) == (FailureKind.DIVERGED, 1)
    result = error.result
    assert result is not None
    assert len(state_of(result)["trained"]) == 2
    [(best, _)] = Result.from_path(result.path).best_checkpoints
    assert best == result.checkpoint
    # Another `fit()` starts from the good one, and ends at the same batch, or leaves it out.
    with pytest.raises(TrainingFailedError):
        fit(quiet, table(poisoned={23}), **run)
    finished = fit(quiet, table(poisoned={23}), **{**run, "on_divergence": "rollback"})
    assert [launch["step"] for launch in journal(finished.path, "Launched")][:2] == [0, 2]
    assert len(state_of(finished)["trained"]) == EPOCHS * PER_EPOCH - 2


def diverges_unread(config: dict[str, Any]) -> None:
    """Reports of a training function that reads data by itself; no batch can be left out."""
    for step in range(3):
        polytrain.report({"loss": float("nan") if step == 2 else config["rate"]})


def fails(quiet: RunConfig, **failures: Any) -> TrainingFailedError:
    with pytest.raises(TrainingFailedError) as caught:
        make_trainer(
            "reference",
            diverges_unread,
            train_loop_config={"rate": 1.0},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=dataclasses.replace(quiet, failure_config=FailureConfig(**failures)),
        ).fit()
    return caught.value


def raises(*_: Any) -> Any:
    raise ValueError("no idea")


def test_a_run_that_can_not_go_back_says_why(quiet: RunConfig) -> None:
    unread = fails(quiet, on_divergence="rollback")
    assert "no data set that polytrain reads was read" in unread.reason
    assert unread.failures[0].kind is FailureKind.DIVERGED
    # The same function, with the same rate: each attempt diverges again.
    again = fails(quiet, on_divergence="rollback", on_rollback=gently, max_rollbacks=2)
    assert again.reason.startswith("rollback 3 of max_rollbacks=2: none is left, after step 3: ")
    assert again.result is not None
    assert [each.number for each in again.result.rollbacks] == [1, 2, 3]


def gently(config: dict[str, Any], rollback: Rollback) -> dict[str, Any]:
    return {"rate": config["rate"] / 2}


def test_rules_and_changes_that_raise_end_the_run(quiet: RunConfig) -> None:
    """The rule's error is the training function's: it ends the run with the second attempt."""
    rule = fails(quiet, on_divergence="rollback", divergence=raises, max_failures=-1)
    assert "ValueError: no idea" in str(rule)
    assert "had the same error at step 0" in rule.reason
    change = fails(quiet, on_divergence="rollback", on_rollback=raises)
    assert change.reason == "FailureConfig.on_rollback: ValueError: no idea"
    assert change.failures[0].kind is FailureKind.DIVERGED
    assert "in raises" in str(change)


def spikes(config: dict[str, Any]) -> None:
    """A checkpoint at each step; it fails once at step 12, and its loss jumps at step 13."""
    import tempfile

    done = 0
    if (checkpoint := polytrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            done = int(Path(directory, "step").read_text())
    for step in range(done + 1, 16):
        if step == 12 and polytrain.get_context().get_attempt() == 0:
            raise ConnectionError("once")
        loss = 9.0 if step == 13 and config["rate"] == 1 else 1.0
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            polytrain.report({"loss": loss}, checkpoint=Checkpoint.from_directory(directory))


def test_a_spike_is_found_by_the_reports_before_a_restart(quiet: RunConfig) -> None:
    failures = FailureConfig(
        max_failures=1, on_divergence="rollback", divergence={"loss": 4}, on_rollback=gently
    )
    result = make_trainer(
        "reference",
        spikes,
        train_loop_config={"rate": 1.0},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=dataclasses.replace(quiet, failure_config=failures),
    ).fit()
    assert [launch["step"] for launch in journal(result.path, "Launched")] == [0, 11, 12]
    [rollback] = result.rollbacks
    assert rollback.reason == "loss is 9, more than 4 times 1, the median of its last 12 values"
    assert [report["loss"] for report in result.history] == [1.0] * 15


def test_that_nothing_can_be_left_out_is_said_once(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def train_without_data() -> None:
        for _ in range(3):
            report({"loss": 0.5}, {}, saves=False)
        attempt = polytrain.get_context().get_attempt()
        if attempt == 0:
            raise ConnectionError("the network is gone")
        if attempt == 1:
            raise TimeoutError("the network is slow")

    failures = FailureConfig(on_divergence="rollback", max_failures=2)
    result = make_trainer(
        "reference",
        train_without_data,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=dataclasses.replace(quiet, failure_config=failures),
    ).fit()
    assert result.restarts == 2
    assert caplog.text.count("in spite of on_divergence='rollback'") == 1


def test_places_that_are_left_out_are_of_the_same_data(quiet: RunConfig) -> None:
    """Without a checkpoint, too: what is left out of other rows would be any of them."""

    def train_rows() -> None:
        for batch in polytrain.get_dataset_shard("train").iter_batches(batch_size=2):
            polytrain.report({"loss": float(batch["loss"].sum())})

    def fit_rows(*losses: float) -> None:
        make_trainer(
            "reference",
            train_rows,
            datasets={"train": {"loss": np.array(losses)}},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=dataclasses.replace(
                quiet,
                name="run",
                failure_config=FailureConfig(on_divergence="rollback", max_rollbacks=1),
            ),
        ).fit()

    with pytest.raises(TrainingFailedError, match="none is left"):
        fit_rows(1.0, np.nan, 1.0, 1.0, np.nan, 1.0)
    with pytest.raises(InvalidJobError, match="its rows differ"):
        fit_rows(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
