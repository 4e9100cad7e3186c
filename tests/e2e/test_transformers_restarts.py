"""Hugging Face's `Trainer`, resumed from a checkpoint: it does what it would have done.

All ranks die, so that none is left to ask for its state.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.torch_runs import HUGGING_FACE, equal
from tests.sweeps import only_in_sweep

from polytrain import Result, RunConfig

fit_with_library = partial(torch_runs.fit, libraries=HUGGING_FACE)


def train(config: dict[str, Any]) -> Any:
    """Dies at a place and after a number of steps, in the first attempt; returns the weights."""
    import os
    import signal

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

    def at(place: str) -> None:
        if polytrain.get_context().get_attempt() or config["dies_at"] != (
            place,
            trainer.state.global_step,
        ):
            return
        polytrain.get_checkpoint()  # It waits for the commit.
        torch.distributed.barrier()
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

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            predicted = self.layers(x)[:, 0]
            return {"loss": (predicted - labels).square().mean(), "logits": predicted}

    class Dies(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            at("step")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == config["epoch_stop"]:
                control.should_epoch_stop = True

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            at("epoch")

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
                "per_device_train_batch_size": 4,
                "logging_steps": 3,
                "eval_strategy": "steps",
                "eval_steps": 4,
                "save_steps": 4,
                "include_num_input_tokens_seen": "all",
                **config["arguments"],
            },
        ),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[Dies(), *stops],
    )
    prepare_trainer(trainer)
    if config["evaluates"]:
        trainer.evaluate()
    trainer.train()
    weights = [each.tolist() for each in trainer.model.parameters()]
    of_all: list[Any] = [None] * polytrain.get_context().get_world_size()
    torch.distributed.all_gather_object(of_all, weights)
    assert of_all == [weights] * len(of_all)
    at("trained")
    if config["evaluates"]:
        loss = trainer.evaluate()["eval_loss"]
        polytrain.report({"last_loss": loss})
    return trainer.state.global_step, {**trainer.model.state_dict()}


def fit(quiet: RunConfig, output: Path, **config: Any) -> tuple[Result, int, dict[str, Any]]:
    chosen = {"dies_at": ("", 0), "output": str(output), "stops": [], "arguments": {}}
    workers = config.pop("workers", 1)
    chosen |= {"evaluates": False, "epoch_stop": 0, **config}
    result = fit_with_library(quiet, train, chosen, workers=workers)
    steps, weights = result.return_value
    return result, steps, weights


def reported(result: Result) -> list[dict[str, Any]]:
    """Its metrics, but for times."""
    timed = ("_runtime", "_per_second", "_preparation_time")
    return [
        {name: each for name, each in report.items() if not name.endswith(timed)}
        for report in result.history
    ]


BEST = {"load_best_model_at_end": True}
EPOCHS = {"eval_strategy": "epoch", "logging_strategy": "epoch"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "after", "options"),
    [
        # The evaluation after the eighth step stops the training, in the first epoch.
        ("trained", 8, {"arguments": BEST, "stops": [1]}),
        only_in_sweep(
            "trained", 8, {"arguments": {**BEST, "logging_strategy": "epoch"}, "stops": [1]}
        ),
        # In the middle of an epoch.
        ("trained", 16, {"arguments": {"max_steps": 16}}),
        only_in_sweep(
            "trained", 16, {"arguments": {**EPOCHS, "save_strategy": "epoch", "max_steps": 16}}
        ),
        # The checkpoint comes before the end of its epoch.
        ("epoch", 12, {"arguments": EPOCHS}),
        only_in_sweep("trained", 24, {"arguments": EPOCHS}),
        ("step", 6, {"arguments": {**BEST, "eval_on_start": True}, "stops": [3]}),
        only_in_sweep(
            "step", 6, {"arguments": {**BEST, "save_strategy": "best", "logging_steps": 0.1}}
        ),
        # The second epoch begins earlier, so its place isn't that of the number of steps.
        ("step", 9, {"epoch_stop": 3}),
        only_in_sweep("step", 5, {"epoch_stop": 4}),
        only_in_sweep("step", 5, {"epoch_stop": 4, "arguments": {"save_strategy": "epoch"}}),
        # Other ranks' running means.
        ("trained", 12, {"workers": 2, "evaluates": True}),
    ],
)
def test_a_restart_does_what_is_left(
    quiet: RunConfig, tmp_path: Path, place: str, after: int, options: dict[str, Any]
) -> None:
    undisturbed, steps, weights = fit(quiet, tmp_path / "undisturbed", **options)
    result, *rest = fit(quiet, tmp_path / "killed", dies_at=(place, after), **options)
    assert result.restarts == 1
    assert rest[0] == steps
    assert equal(rest[1], weights)
    assert reported(result) == reported(undisturbed)
