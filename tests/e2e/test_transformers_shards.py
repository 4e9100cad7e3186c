"""Hugging Face's `Trainer` on a shard's batches, killed and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.test_transformers import fit_with_library, weights
from tests.e2e.torch_runs import equal

from polytrain import Result, RunConfig, TrainingFailedError

ROWS = 48

in_sweep = pytest.mark.only_in_sweep


def train(config: dict[str, Any]) -> None:
    import os
    import signal

    import torch
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import polytrain
    from polytrain_torch.transformers import prepare_trainer

    seen: list[tuple[int, int]] = []

    class Regression(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layer = torch.nn.Linear(1, 1)
            self.post_init()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.training:
                seen.extend((trainer.state.global_step, int(each)) for each in labels)
            predicted = self.layer(x[:, None])[:, 0]
            return {"loss": (predicted - labels / ROWS).square().mean(), "logits": predicted}

    class Dies(TrainerCallback):
        """In the first attempt, once the newest checkpoint is committed.

        If all ranks die, none is left to ask for its state.
        """

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            context = polytrain.get_context()
            dies = context.get_world_rank() >= config["lives"] and context.get_attempt() == 0
            if dies and state.global_step == config["dies_after"]:
                polytrain.get_checkpoint()
                os.kill(os.getpid(), signal.SIGKILL)

    evaluated_rows: list[int] = []

    def evaluated(prediction: Any, compute_result: bool = True) -> dict[str, Any]:
        """With batch_eval_metrics it is called for each batch."""
        evaluated_rows.extend(round(float(each)) for each in prediction.label_ids)
        if not compute_result:
            return {}
        rows = sorted(evaluated_rows)
        evaluated_rows.clear()
        return {"rows": rows}

    def batches(name: str) -> Any:
        return polytrain.get_dataset_shard(name).iter_torch_batches(batch_size=4)

    torch.manual_seed(3)
    shard = polytrain.get_dataset_shard("train")
    trainer = Trainer(
        model=Regression(PretrainedConfig()),
        args=TrainingArguments(
            output_dir=config["output"],
            logging_steps=2,
            eval_strategy="steps",
            report_to=[],
            disable_tqdm=True,
            **{"num_train_epochs": 3, "save_steps": 4, "eval_steps": 4, **config["arguments"]},
        ),
        train_dataset=shard if config["gives_shard"] else batches("train"),
        eval_dataset=batches("evaluation"),
        compute_metrics=evaluated,
        callbacks=[Dies()],
    )
    prepare_trainer(trainer).train()
    everybodys: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybodys, seen)
    polytrain.report({"seen": sorted(each for rank in everybodys for each in rank)})


def fit(
    quiet: RunConfig,
    output: Path,
    *,
    dies_after: int = -1,
    lives: int = 0,
    arguments: Mapping[str, Any] | None = None,
    gives_shard: bool = False,
    data: Any = None,
    evaluated: int = 16,
    **options: Any,
) -> Result:
    config = {
        "output": str(output),
        "dies_after": dies_after,
        "lives": lives,
        "arguments": arguments or {},
        "gives_shard": gives_shard,
    }
    datasets = {"train": data or rows_of(ROWS), "evaluation": rows_of(evaluated)}
    return fit_with_library(quiet, train, config, datasets=datasets, **options)


def rows_of(count: int) -> dict[str, Any]:
    number = np.arange(float(count), dtype=np.float32)
    return {"x": number / count, "labels": number}


def rows(result: Result, *, first_step: int, steps: int) -> list[int]:
    """Numbers of the rows that all ranks trained on in some steps, sorted."""
    last = first_step + steps
    return sorted(row for step, row in result.metrics["seen"] if first_step <= step < last)


@pytest.mark.parametrize(
    ("dies_after", "saved", "lives", "arguments"),
    [
        # Six steps are an epoch.
        pytest.param(9, 8, 0, {}, id="in mid-epoch"),
        pytest.param(9, 9, 1, {}, id="in mid-epoch, of one rank"),
        pytest.param(
            5, 4, 0, {"gradient_accumulation_steps": 2}, id="accumulating", marks=in_sweep
        ),
        pytest.param(6, 6, 0, {"save_strategy": "epoch"}, id="behind an epoch", marks=in_sweep),
    ],
)
def test_every_row_comes_once_in_each_epoch_over_a_kill(
    quiet: RunConfig,
    tmp_path: Path,
    dies_after: int,
    saved: int,
    lives: int,
    arguments: dict[str, Any],
) -> None:
    undisturbed = fit(quiet, tmp_path / "undisturbed", arguments=arguments)
    killed = fit(
        quiet, tmp_path / "killed", dies_after=dies_after, lives=lives, arguments=arguments
    )
    assert killed.restarts == 1
    per_epoch = 6 // arguments.get("gradient_accumulation_steps", 1)
    for first_step in range(0, 3 * per_epoch, per_epoch):
        assert rows(undisturbed, first_step=first_step, steps=per_epoch) == [*range(ROWS)]
    after = [each for each in undisturbed.metrics["seen"] if each[0] >= saved]
    assert killed.metrics["seen"] == after
    assert equal(weights(killed), weights(undisturbed))
    assert killed.history[-2]["epoch"] == 3


@in_sweep
@pytest.mark.on_ray
def test_a_stream_of_unknown_length_resumes_in_its_second_epoch(
    quiet: RunConfig, tmp_path: Path
) -> None:
    import ray.data

    stream = ray.data.range(ROWS, override_num_blocks=4).map_batches(
        lambda batch: {name: batch["id"].astype("float32") for name in ("x", "labels")}
    )
    killed = fit(quiet, tmp_path, data=stream, dies_after=9, arguments={"max_steps": 18})
    assert killed.restarts == 1
    # The checkpoint is that of step 8; the second epoch ends with step 12.
    earlier = {*range(ROWS)} - {*rows(killed, first_step=8, steps=4)}
    assert len(rows(killed, first_step=8, steps=4)) == 4 * 8
    assert len(earlier) == 2 * 8
    assert rows(killed, first_step=12, steps=6) == [*range(ROWS)]


@pytest.mark.parametrize("by_batch", [pytest.param(False, marks=in_sweep), True])
def test_an_evaluation_sees_every_row_once(
    quiet: RunConfig, tmp_path: Path, by_batch: bool
) -> None:
    """Also if the ranks have different numbers of rows."""
    arguments = {"max_steps": 4, "batch_eval_metrics": by_batch}
    result = fit(quiet, tmp_path, evaluated=21, arguments=arguments)
    evaluations = [each["eval_rows"] for each in result.history if "eval_rows" in each]
    assert evaluations == [[*range(21)]]


def test_a_changed_number_of_batches_is_refused(quiet: RunConfig, tmp_path: Path) -> None:
    begun = fit(quiet, tmp_path / "begun", workers=1, arguments={"max_steps": 4})
    with pytest.raises(
        TrainingFailedError, match=r"epochs of 12 batches .* train_dataset now has 6.*num_workers"
    ):
        fit(quiet, tmp_path / "larger", restore_from=begun.checkpoint)


def test_a_shard_is_refused_with_the_way_to_its_batches(quiet: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingFailedError, match=r"train_dataset is a shard.*iter_torch_batches\(batch_size=…\)"
    ):
        fit(quiet, tmp_path, workers=1, gives_shard=True)
