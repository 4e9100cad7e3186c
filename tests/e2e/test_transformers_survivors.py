"""A loss costs Hugging Face's `Trainer` no step: a rank that is left has the last one's state.

The model has BatchNorm and dropout, gradients add up over two batches, and no checkpoint is saved
before the last step: a run that begins an attempt in between has its state from a survivor.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e import torch_runs
from tests.e2e.journals import journal
from tests.e2e.torch_runs import HUGGING_FACE, equal
from tests.sweeps import only_in_sweep

from polytrain import CheckpointConfig, Result, RunConfig

fit_with_library = partial(torch_runs.fit, libraries=HUGGING_FACE)


def train(config: dict[str, Any]) -> float:
    """Rank `rank` dies at a place of a step, counted from 1, in the first attempt."""
    import os
    import signal
    from pathlib import Path

    import torch
    from transformers import (
        EarlyStoppingCallback,
        PretrainedConfig,
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import polytrain
    from polytrain_torch.transformers import prepare_trainer
    from polytrain_torch.transformers import trainer as reporting

    context = polytrain.get_context()
    dies = context.get_attempt() == 0 and context.get_world_rank() == config["rank"]

    def at(place: str) -> None:
        if dies and (place, trainer.state.global_step + 1) == (config["place"], config["step"]):
            os.kill(os.getpid(), signal.SIGKILL)

    class Regression(PreTrainedModel):
        config_class = PretrainedConfig
        main_input_name = "x"

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8),
                torch.nn.BatchNorm1d(8),
                torch.nn.Dropout(0.2),
                torch.nn.Linear(8, 1),
            )
            self.post_init()

        def num_parameters(self, **_: Any) -> int:
            # Its operations differ by rank, as those of batches of other lengths.
            return 10 + context.get_world_rank()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            at("forward" if self.training else "evaluation")
            predicted = self.layers(x)[:, 0]
            loss = (predicted - labels).square().mean()
            if self.training:
                loss.register_hook(lambda _: at("backward"))
            return {"loss": loss, "logits": predicted}

    class Dies(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            at("epoch begins")

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            at("step begins")

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            at("accumulated")

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            at("clipped")

        def on_log(self, *_: Any, **__: Any) -> None:
            at("log")

        def on_train_end(self, *_: Any, **__: Any) -> None:
            at("end")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            at("optimizer")
            if config["steps"] and context.get_world_rank() != config["rank"]:
                with Path(config["steps"]).open("a") as file:
                    file.write(f"{trainer.state.global_step + 1}\n")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at("step")
            control.should_epoch_stop = state.global_step == config["epoch_stop"]

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            at("epoch")

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            at("evaluated")

        def on_save(self, *_: Any, **__: Any) -> None:
            at("save")

    own_report = reporting.report_part

    def report(*args: Any, **options: Any) -> None:
        at("report")
        own_report(*args, **options)

    reporting.report_part = report
    x = torch.arange(144.0).reshape(48, 3) / 144
    rows = [{"x": row, "labels": row.sum()} for row in x]
    torch.manual_seed(3)
    stops = [EarlyStoppingCallback(each, 100.0) for each in config["stops"]]
    trainer = Trainer(
        model=Regression(PretrainedConfig()),
        args=TrainingArguments(
            output_dir=config["output"],
            report_to=[],
            disable_tqdm=True,
            **{
                "num_train_epochs": 2,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "logging_steps": 3,
                "eval_strategy": "steps",
                "eval_steps": 4,
                "save_steps": 1000,
                "include_num_input_tokens_seen": "all",
                **config["arguments"],
            },
        ),
        train_dataset=rows,
        # Each rank has rows of its own.
        eval_dataset=rows,
        callbacks=[Dies(), *stops],
    )
    checkpoint = polytrain.get_checkpoint()
    if config["steps"] and checkpoint is not None:
        names = [each.name for each in Path(checkpoint.path).rglob("*")]
        Path(config["steps"] + " begin").write_text("\n".join(names))
    prepare_trainer(trainer)
    if config["looks"]:
        next(iter(trainer.get_train_dataloader()))
        for _ in trainer.get_train_dataloader():
            break
    trainer.train()
    return trainer.state.total_flos


def fit(
    quiet: RunConfig, output: Path, place: str = "", step: int = 0, **config: Any
) -> tuple[Result, dict[str, torch.Tensor]]:
    chosen = {"place": place, "step": step, "rank": 1, "output": str(output), "stops": []}
    chosen |= {"looks": False, "epoch_stop": 0}
    chosen |= {"steps": "", "arguments": {}}
    changes = {name: config.pop(name) for name in list(config) if name not in chosen}
    result = fit_with_library(quiet, train, {**chosen, **config}, **changes)
    assert result.checkpoint is not None
    return result, load_file(Path(result.checkpoint.path, "model.safetensors"))


def reported(result: Result) -> list[dict[str, Any]]:
    """Its metrics, but for times; and all ranks' operations, which are added up since a log."""
    timed = ("_runtime", "_per_second")
    metrics = [
        {name: each for name, each in report.items() if not name.endswith(timed)}
        for report in result.history
    ]
    return [*metrics, {"operations": result.return_value}]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Result, dict[str, torch.Tensor]]:
    there = tmp_path_factory.mktemp("undisturbed")
    return fit(RunConfig(storage_path=there / "runs", progress=False), there / "output")


# In `make test`, the waits of the rank that is left that are not those of plain torch: for an
# evaluation, a report and a file. `test_survivors` has those for gradients and for the next step.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "step", "rank"),
    [
        only_in_sweep("forward", 3, 1),
        only_in_sweep("backward", 4, 0),
        only_in_sweep("optimizer", 2, 1),
        only_in_sweep("step", 6, 1),
        # The trainer has counted the step by then.
        ("evaluation", 5, 0),
        # The other rank has ended its evaluation, and begins the next step.
        only_in_sweep("evaluated", 5, 1),
        only_in_sweep("evaluated", 5, 0),
        ("report", 4, 0),
        only_in_sweep("epoch", 7, 1),
        ("save", 13, 1),
        only_in_sweep("epoch begins", 7, 0),
        only_in_sweep("step begins", 3, 0),
        only_in_sweep("accumulated", 5, 1),
        only_in_sweep("clipped", 6, 0),
        only_in_sweep("log", 4, 0),
        only_in_sweep("evaluated", 9, 1),
        only_in_sweep("end", 13, 0),
        only_in_sweep("end", 13, 1),
    ],
)
def test_no_step_is_repeated(
    quiet: RunConfig,
    tmp_path: Path,
    undisturbed: tuple[Result, dict[str, torch.Tensor]],
    place: str,
    step: int,
    rank: int,
) -> None:
    steps = tmp_path / "steps"
    result, weights = fit(quiet, tmp_path / "output", place, step, rank=rank, steps=str(steps))
    assert result.restarts == 1
    assert len(journal(result.path, "SurvivorsAsked")) == 1
    # Those of the rank that was left, in both attempts.
    assert sorted(map(int, steps.read_text().split())) == [*range(1, 13)]
    if place != "end":
        # What the survivor has written is what the trainer saves.
        assert {"config.json", "model.safetensors"} <= {*Path(f"{steps} begin").read_text().split()}
    assert equal(weights, undisturbed[1])
    assert reported(result) == reported(undisturbed[0])


EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
SAVED = {"save_strategy": "epoch"}
STOPS = {"load_best_model_at_end": True, "save_steps": 4}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "step", "options"),
    [
        # Evaluated, and saved, at the end of an epoch.
        only_in_sweep("evaluation", 7, {"arguments": EPOCHS}),
        # The evaluation after the eighth step stops the training.
        only_in_sweep("evaluation", 9, {"arguments": STOPS, "stops": [1]}),
        # In mid-epoch, whose end logs values of that step.
        ("evaluation", 9, {"arguments": {**STOPS, "logging_strategy": "epoch"}, "stops": [1]}),
        # The second of two evaluations without progress comes after the restart.
        ("backward", 10, {"arguments": {**STOPS, "num_train_epochs": 3}, "stops": [2]}),
        # Each rank has its own statistics.
        ("backward", 5, {"arguments": {"ddp_broadcast_buffers": False}}),
        only_in_sweep("backward", 5, {"looks": True}),
        # The second epoch begins earlier, so its place isn't that of the number of steps.
        only_in_sweep("backward", 6, {"epoch_stop": 3, "arguments": SAVED}),
        # The evaluation of the step that stops the epoch.
        only_in_sweep("evaluation", 5, {"epoch_stop": 4, "arguments": SAVED}),
    ],
)
def test_what_the_trainer_does_beside_its_steps_is_done_once(
    quiet: RunConfig, tmp_path: Path, place: str, step: int, options: dict[str, Any]
) -> None:
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", **options)
    result, weights = fit(quiet, tmp_path / "killed", place, step, **options)
    assert result.restarts == 1
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    assert equal(weights, expected)
    assert reported(result) == reported(undisturbed)


def test_a_worker_without_peers_continues_from_its_copy(quiet: RunConfig, tmp_path: Path) -> None:
    alone = {"workers": 1, "rank": 0}
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", **alone)
    copying = {**alone, "checkpoint_config": CheckpointConfig(memory=1)}
    result, weights = fit(quiet, tmp_path / "killed", "backward", 8, **copying)
    assert result.restarts == 1
    [again] = journal(result.path, "Launched")[1:]
    assert again["start"] is not None
    assert equal(weights, expected)
    assert reported(result) == reported(undisturbed)


def test_callbacks_of_one_class_count_on_from_a_checkpoint(
    quiet: RunConfig, tmp_path: Path
) -> None:
    """The second of two evaluations without progress, after the first epoch, comes after it."""
    options: dict[str, Any] = {"arguments": STOPS, "stops": [9, 2], "workers": 1, "rank": 0}
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", **options)
    result, weights = fit(quiet, tmp_path / "killed", "backward", 10, **options)
    assert result.restarts == 1
    assert undisturbed.metrics["epoch"] == 1
    assert equal(weights, expected)
    assert reported(result) == reported(undisturbed)
