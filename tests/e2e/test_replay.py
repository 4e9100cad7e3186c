"""A stretch of a run again: equal, or the first difference named; the run's files stay the same."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.e2e.boosters import BACKENDS, LOGISTIC, a_table
from tests.sweeps import Selected

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    DataConfig,
    InvalidJobError,
    RunConfig,
    ScalingConfig,
    Trainer,
    make_trainer,
)
from polytrain.torch import TrainingState, prepare_model
from polytrain.view.cli import main
from polytrain_plugins import RunInfo, hookimpl


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["rate"])
    state = TrainingState(model=model, optimizer=optimizer)
    step = state.restore().get("step", 0)
    shard = polytrain.get_dataset_shard("train")
    while step < config["steps"]:
        for batch in shard.iter_torch_batches(batch_size=8):
            x = torch.stack([batch[name] for name in "abc"], 1).float()
            loss = (model(x)[:, 0] - batch["y"].float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            metrics = {"loss": loss.item(), "drawn": torch.rand(()).item()}
            if config.get("flips") == step and not Path(config["marker"]).exists():
                Path(config["marker"]).touch()
                flip(state, random.Random(config["seed"]), bits=config.get("bits", range(31)))
            if step % 5:
                polytrain.report(metrics)
            else:
                state.report(metrics, step=step)
            if step == config["steps"]:
                break


def flip(state: TrainingState, chance: random.Random, *, bits: Sequence[int]) -> None:
    """Flip one of these bits of one number of the model or of the optimizer."""
    model, optimizer = state.parts["model"], state.parts["optimizer"]
    moments = [each for moments in optimizer.state.values() for each in moments.values()]
    tensor = chance.choice([*model.parameters(), *moments])
    with torch.no_grad():
        words = tensor.view(-1).view(torch.int32)
        words[chance.randrange(len(words))] ^= 1 << chance.choice(bits)


def of_another_code(config: dict[str, Any]) -> None:
    train(config)


def rows(seed: int = 0) -> pd.DataFrame:
    return pd.DataFrame(np.random.default_rng(seed).normal(size=(64, 4)), columns=list("abcy"))


def a_trainer(
    storage: Path,
    workers: int = 1,
    *,
    function: Callable[..., Any] = train,
    data: pd.DataFrame | None = None,
    digests: int | None = None,
    **config: Any,
) -> Trainer:
    return make_trainer(
        "torch",
        function,
        train_loop_config={"rate": 0.01, "steps": 20, **config},
        datasets={"train": rows() if data is None else data},
        dataset_config=DataConfig(shuffle=True),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="run", storage_path=storage, progress=False, digests=digests),
    )


def contents(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = [each for each in directory.rglob("*") if each.is_file()]
    return {str(each): (each.read_bytes(), os.stat(each).st_mtime_ns) for each in files}


def test_a_stretch_is_equal_and_nothing_is_written_into_the_run(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path / "runs", workers=2, digests=2)
    result = trainer.fit()
    before = contents(tmp_path / "runs")
    # The number of workers is the run's.
    alone = a_trainer(tmp_path / "runs", 0, digests=2)
    found = result.replay(alone, from_step=10, steps=6)
    assert found.is_equal, found
    assert (found.from_step, found.to_step, found.reports, found.digests) == (10, 16, 6, 3)
    assert contents(tmp_path / "runs") == before
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["run"]


@pytest.mark.sweep
def test_a_flipped_bit_is_named_each_time(tmp_path: Path, selected: Selected) -> None:
    for seed in selected(range(20), 10):
        step = random.Random(seed).randrange(11, 20)
        runs, marker = tmp_path / str(seed), str(tmp_path / f"{seed} is done")
        trainer = a_trainer(runs, 0, digests=1, flips=step, marker=marker, seed=seed)
        result = trainer.fit()
        found = result.replay(trainer, from_step=10, storage_path=tmp_path / "elsewhere")
        first = found.differences[0]
        assert (first.step, first.kind) == (step, "tensor"), found
        assert first.name.startswith(("model/", "optimizer/state/"))
        if step > 11:
            before = result.replay(trainer, from_step=10, steps=step - 11)
            assert (before.is_equal, before.digests) == (True, step - 11)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.sweep
def test_runs_without_a_fault_raise_no_alarm(tmp_path: Path, selected: Selected) -> None:
    for number in selected(range(50), 17):
        trainer = a_trainer(tmp_path / str(number), 0, digests=1 + number % 3, data=rows(number))
        found = trainer.fit().replay(trainer, from_step=5 * (number % 4))
        assert found.is_equal, found
        assert found.digests > 0


def test_without_digests_the_first_metric_is_named(tmp_path: Path) -> None:
    marker = str(tmp_path / "marker")
    # A high bit: whether a low one shows in the loss depends on the CPU.
    trainer = a_trainer(tmp_path / "runs", 0, flips=13, marker=marker, seed=1, bits=[21, 22])
    result = trainer.fit()
    found = result.replay(trainer, from_step=10)
    (difference,) = found.differences
    # Step 13 reports the loss before the flip.
    assert (difference.step > 13, difference.kind, difference.name) == (True, "metric", "loss")
    assert difference.was == result.history[difference.step - 1]["loss"] != difference.now
    assert "Only metrics were compared" in str(found)
    assert result.replay(trainer, from_step=10, ignore=["loss"]).is_equal


def validating(config: dict[str, Any]) -> None:
    for step in range(1, 4):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            checkpoint = polytrain.Checkpoint.from_directory(directory)
            polytrain.report({"step": step}, checkpoint=checkpoint, validation=True)


def validate(checkpoint: polytrain.Checkpoint) -> dict[str, float]:
    return {"validated": 1.0}


def test_a_replay_validates_nothing_and_no_installed_observer_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it miss the metric that ranks the run's checkpoints."""
    seen: list[str] = []

    class Observer:
        @hookimpl
        def polytrain_run_started(self, run: RunInfo) -> None:
            seen.append(run.path)

    monkeypatch.setattr("polytrain.run.fit.installed_observers", lambda: [Observer()])
    trainer = make_trainer(
        "reference",
        validating,
        validation_config=polytrain.ValidationConfig(fn=validate),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run",
            storage_path=tmp_path,
            progress=False,
            checkpoint_config=CheckpointConfig(
                checkpoint_score_attribute="validated", checkpoint_score_order="min"
            ),
        ),
    )
    result = trainer.fit()
    assert result.history[-1]["validated"] == 1.0
    caplog.clear()
    found = result.replay(trainer, from_step=0)
    assert (found.is_equal, found.reports) == (True, 3)
    assert not caplog.records
    assert seen == [result.path]


def test_what_has_changed_is_named_before_anything_starts(tmp_path: Path) -> None:
    result = a_trainer(tmp_path, 0).fit()
    before = contents(tmp_path)
    for field, other in {
        "train_loop_per_worker": a_trainer(tmp_path, 0, function=of_another_code),
        "train_loop_config": a_trainer(tmp_path, 0, rate=0.02),
        "datasets['train']": a_trainer(tmp_path, 0, data=rows(1)),
    }.items():
        with pytest.raises(InvalidJobError, match="a replay repeats it") as refused:
            result.replay(other)
        assert [problem.field for problem in refused.value.problems] == [field]
    with pytest.raises(InvalidJobError, match=r"(?s)from_step.*steps"):
        result.replay(a_trainer(tmp_path, 0), from_step=-1, steps=0)
    with pytest.raises(CheckpointError, match="no reports after step 20"):
        result.replay(a_trainer(tmp_path, 0), from_step=20)
    assert contents(tmp_path) == before
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)

    def lose(text: str) -> None:
        at = next(at for at, line in enumerate(lines) if text in line)
        lost = lines[at][:20] + "\n"
        journal.write_text("".join((*lines[:at], lost, *lines[at + 1 :])))

    lose('"step": 17')
    with pytest.raises(
        CheckpointError, match=r"from step 15 to 20: .* Give from_step and steps of"
    ):
        result.replay(a_trainer(tmp_path, 0))
    assert result.replay(a_trainer(tmp_path, 0), from_step=10, steps=5).is_equal
    # It may also be the line of a driver that has resumed it, or of what was left out.
    lose('"Begun"')
    with pytest.raises(CheckpointError, match=r"replayed: .*line 2 can't be read"):
        result.replay(a_trainer(tmp_path, 0))


def counting(config: dict[str, Any]) -> None:
    done = polytrain.get_checkpoint()
    step = 0 if done is None else int(done.get_metadata()["step"])
    while step < 4:
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = Checkpoint.from_directory(directory)
            checkpoint.set_metadata({"step": step})
            polytrain.report({"rate": config["rate"]}, checkpoint=checkpoint)


def test_each_stretch_is_compared_with_what_it_was_trained_with(tmp_path: Path) -> None:
    """The run was stopped after two steps, and resumed with another config."""

    def a_trainer(rate: float, stop: dict[str, int] | None = None) -> Trainer:
        return make_trainer(
            "reference",
            counting,
            train_loop_config={"rate": rate},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=tmp_path, progress=False, stop=stop),
        )

    before, after = a_trainer(0.1), a_trainer(0.2)
    a_trainer(0.1, {"training_iteration": 2}).fit()
    result = after.fit()
    assert [each["rate"] for each in result.history] == [0.1, 0.1, 0.2, 0.2]
    found = result.replay(before, from_step=0)
    assert (found.is_equal, found.to_step) == (True, 2)
    assert "from step 3 on the run was trained with other values of train_loop_config" in str(found)
    found = result.replay(after, from_step=2)
    assert (found.is_equal, found.reports) == (True, 2)
    with pytest.raises(InvalidJobError, match=r"trained with \{'rate': 0.1\}.* from step 3 on"):
        result.replay(after, from_step=0)
    with pytest.raises(
        InvalidJobError, match=r"trained with \{'rate': 0.2\}, now it is \{'rate': 0.1"
    ):
        result.replay(before, from_step=2)


def test_the_command_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    np.savetxt("rows.csv", rows(), delimiter=",", header="a,b,c,y", comments="")
    assert main(["run", "job.toml"]) == 0
    assert main(["replay", "--from", "4", "--steps", "4", "runs/job", "job.toml"]) == 0
    Path("job.toml").write_text(JOB.replace("0.1", "0.2"))
    assert main(["replay", "runs/job", "job.toml"]) == 2


JOB = """
backend = "reference"
rounds = 10
label = "y"
learning_rate = 0.1
datasets.train = "rows.csv"
scaling_config.num_workers = 0
run_config.name = "job"
run_config.storage_path = "runs"
run_config.checkpoint_config.checkpoint_frequency = 2
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_of_boosters_are_equal(tmp_path: Path, backend: str) -> None:
    trainer = make_trainer(
        backend,
        params=LOGISTIC[backend],
        num_boost_round=8,
        label="y",
        datasets={"train": a_table()},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run",
            storage_path=tmp_path,
            checkpoint_config=CheckpointConfig(checkpoint_frequency=3),
            digests=4,
        ),
    )
    found = trainer.fit().replay(trainer, from_step=4)
    assert (str(found), found.from_step) == (
        "5 reports are equal, from step 4 to 8, and 2 digests of the state.",
        3,
    )
