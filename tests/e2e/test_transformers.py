"""Hugging Face's `Trainer`, killed and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.e2e import torch_runs
from tests.e2e.torch_runs import HUGGING_FACE, equal
from tests.sweeps import only_in_sweep

from polytrain import (
    CheckpointConfig,
    Result,
    RunConfig,
    TrainingFailedError,
)

fit_with_library = partial(torch_runs.fit, libraries=HUGGING_FACE)


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

    seen: list[int] = []

    class Regression(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
            )
            self.post_init()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.training:
                seen.extend(round(float(each) * 144 / 3) for each in x[:, 0])
            predicted = self.layers(x)[:, 0]
            return {"loss": (predicted - labels).square().mean(), "logits": predicted}

    class Dies(TrainerCallback):
        """In the first attempt, on all ranks: none is left to ask for its state."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_first = polytrain.get_context().get_attempt() == 0
            if is_first and state.global_step == config["dies_after"]:
                os.kill(os.getpid(), signal.SIGKILL)

    x = torch.arange(144.0).reshape(48, 3) / 144
    rows = [{"x": row, "labels": row.sum()} for row in x]
    torch.manual_seed(3)
    trainer = Trainer(
        model=Regression(PretrainedConfig()),
        args=TrainingArguments(
            output_dir=config["output"],
            save_steps=4,
            logging_steps=2,
            report_to=[],
            disable_tqdm=True,
            save_total_limit=1,
            **{"num_train_epochs": 3, "per_device_train_batch_size": 4, **config["arguments"]},
        ),
        train_dataset=rows,
        eval_dataset=rows[:8],
        callbacks=[Dies()],
    )
    # As scripts do that look for a checkpoint themselves.
    prepare_trainer(trainer).train(resume_from_checkpoint=None)
    everybodys: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybodys, seen)
    polytrain.report({"rows": sorted(row for each in everybodys for row in each)})


def fit(
    quiet: RunConfig,
    output: Path,
    *,
    dies_after: int = -1,
    arguments: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Result:
    config = {"output": str(output), "dies_after": dies_after, "arguments": arguments or {}}
    return fit_with_library(quiet, train, config, **changes)


def weights(result: Result) -> dict[str, torch.Tensor]:
    assert result.checkpoint is not None
    return load_file(Path(result.checkpoint.path, "model.safetensors"))


# In `make test` each who writes once, over all front ends: `test_torch_rank_states` has the rest.
@pytest.mark.sweep
@pytest.mark.parametrize("written_by", ["rank_0", only_in_sweep("every_rank")])
def test_a_killed_run_ends_in_the_same_weights(
    quiet: RunConfig, tmp_path: Path, written_by: Any
) -> None:
    """It dies in the middle of an epoch, behind a checkpoint."""
    config = CheckpointConfig(written_by=written_by)
    undisturbed = fit(quiet, tmp_path / "undisturbed", checkpoint_config=config)
    assert undisturbed.checkpoint is not None
    killed = fit(quiet, tmp_path / "killed", dies_after=10, checkpoint_config=config)
    assert killed.restarts == 1
    assert equal(weights(killed), weights(undisturbed))
    # It is saved where all is logged: no rank has sums of its own.
    assert not [*Path(undisturbed.checkpoint.path).glob("own-*")]
    assert undisturbed.metrics["rows"] == sorted([*range(48)] * 3)
    # Ten steps of four rows on each of two ranks were left.
    assert len(killed.metrics["rows"]) == 10 * 8
    assert killed.history[-2]["train_loss"] > 0
    steps = [report["epoch"] for report in killed.history if "loss" in report]
    assert steps == [report["epoch"] for report in undisturbed.history if "loss" in report]


def finds_its_best_model_early(config: dict[str, Any]) -> Any:
    """Its output directory is gone when it resumes."""
    import os
    import shutil
    import signal

    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback
    from transformers import TrainingArguments as Arguments

    import polytrain
    from polytrain_torch.transformers import prepare_trainer

    class Weight(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.post_init()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            predicted = self.weight * x
            return {"loss": (predicted - labels).square().mean(), "logits": predicted}

    class Dies(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 7 and polytrain.get_context().get_attempt() == 0:
                shutil.rmtree(config["output"], ignore_errors=True)
                os.kill(os.getpid(), signal.SIGKILL)

    directory = config["output"] + ("" if polytrain.get_context().get_attempt() == 0 else "2")
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = Trainer(
        Weight(PretrainedConfig()),
        Arguments(
            output_dir=directory,
            **often,
            max_steps=8,
            per_device_train_batch_size=4,
            learning_rate=0.1,
            load_best_model_at_end=True,
            metric_for_best_model="score",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"x": torch.ones(1), "labels": torch.ones(1)}] * 32,
        eval_dataset=[{"x": torch.ones(1), "labels": torch.ones(1)}] * 4,
        compute_metrics=lambda _: {"score": -abs(trainer.state.global_step - 4)},
        callbacks=[Dies()] if config["dies"] else [],
    )
    prepare_trainer(trainer).train()
    return trainer.state.best_global_step, float(trainer.model.weight)


@pytest.mark.sweep
@pytest.mark.parametrize("keeps_best", [True, only_in_sweep(False)])
def test_the_best_model_is_taken_from_the_runs_checkpoints(
    quiet: RunConfig, tmp_path: Path, keeps_best: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The output directory that had it is gone, as on another machine."""

    def returned(name: str, **changes: Any) -> Any:
        config = {"output": str(tmp_path / name), "dies": name == "killed"}
        return fit_with_library(quiet, finds_its_best_model_early, config, **changes).return_value

    whole = returned("whole")
    assert whole[0] == 4
    best = {"checkpoint_score_attribute": "eval_score"} if keeps_best else {}
    killed = returned("killed", checkpoint_config=CheckpointConfig(num_to_keep=1, **best))
    assert (killed == whole) is keeps_best
    lost = "The best model so far, of step 4, is lost"
    assert (lost in "".join(capfd.readouterr())) is not keeps_best


def test_one_worker_is_enough(quiet: RunConfig, tmp_path: Path) -> None:
    result = fit(quiet, tmp_path, workers=1)
    assert result.history[-2]["train_loss"] > 0
    assert result.history[-2]["epoch"] == 3
    assert result.metrics["rows"] == sorted([*range(48)] * 3)
    assert weights(result)["layers.0.weight"].shape == (8, 3)


def test_another_number_of_workers_goes_on_in_the_same_steps_only(
    quiet: RunConfig, tmp_path: Path
) -> None:
    """Three epochs of 12 steps by one worker would be over after one on two."""
    begun = fit(quiet, tmp_path / "begun", workers=1, arguments={"num_train_epochs": 1})
    with pytest.raises(
        TrainingFailedError,
        match=r"1 workers in steps of 4 rows\. 2 workers in .* 8.*num_workers",
    ):
        fit(quiet, tmp_path / "larger", restore_from=begun.checkpoint)
    same = {"per_device_train_batch_size": 2}
    result = fit(quiet, tmp_path / "same", restore_from=begun.checkpoint, arguments=same)
    assert result.metrics["rows"] == sorted([*range(48)] * 2)
    assert result.history[-2]["epoch"] == 3


def test_checkpoints_that_are_kept_for_being_the_best_have_their_metrics(
    quiet: RunConfig, tmp_path: Path
) -> None:
    """The trainer decides after it has logged them."""
    best = {"save_strategy": "best", "eval_strategy": "steps", "metric_for_best_model": "loss"}
    result = fit(quiet, tmp_path, workers=1, arguments={**best, "eval_steps": 4})
    kept = [metrics for _, metrics in result.best_checkpoints]
    assert kept
    assert all(metrics["eval_loss"] > 0 for metrics in kept)


def train_two(config: dict[str, Any]) -> None:
    """One trainer after another."""
    import os
    import signal

    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import polytrain
    from polytrain_torch.transformers import prepare_trainer

    class Regression(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (super().forward(x)[:, 0] - labels).square().mean()}

    class Counts(TrainerCallback):
        def __init__(self, name: str) -> None:
            self.name = name
            self.steps = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            dies = polytrain.get_context().get_attempt() == 0 and self.name == config["dies_in"]
            if dies and state.global_step == 6:
                polytrain.get_checkpoint()  # It waits for the commit.
                os.kill(os.getpid(), signal.SIGKILL)
            self.steps += 1

    rows = [{"x": torch.ones(3), "labels": torch.ones(())}] * 40
    steps = []
    for name in ("first", "second"):
        counts = Counts(name)
        arguments = TrainingArguments(
            output_dir=f"{config['output']}/{name}",
            num_train_epochs=1,
            per_device_train_batch_size=4,
            save_steps=4,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=Regression(3, 1), args=arguments, train_dataset=rows, callbacks=[counts]
        )
        prepare_trainer(trainer).train()
        steps.append(counts.steps)
    polytrain.report({"steps": steps})


def test_of_several_trainers_the_one_that_saved_goes_on(quiet: RunConfig, tmp_path: Path) -> None:
    config = {"output": str(tmp_path), "dies_in": "first"}
    result = fit_with_library(quiet, train_two, config, workers=1)
    assert result.restarts == 1
    # Ten each, the first's from its checkpoint on.
    assert result.metrics["steps"] == [6, 10]


def test_what_an_earlier_trainer_has_trained_is_not_taken_from_a_later_one(
    quiet: RunConfig, tmp_path: Path
) -> None:
    config = {"output": str(tmp_path), "dies_in": "second"}
    with pytest.raises(
        TrainingFailedError, match=r"train\(\) number 1 .* number 2 saved .*own run"
    ):
        fit_with_library(quiet, train_two, config, workers=1)


def saves_what_it_cannot_load(config: dict[str, Any]) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    from polytrain_torch.transformers import prepare_trainer

    class Regression(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (super().forward(x)[:, 0] - labels).square().mean()}

        def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
            if config["part"] == "model":
                state_dict = {"weight": state_dict["kernel"]}
            return super().load_state_dict(state_dict, *args, **options)

    class Optimizer(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            # Accelerate itself loads the state of one that has none yet.
            if config["part"] == "optimizer" and state_dict["state"]:
                raise KeyError("moments")
            super().load_state_dict(state_dict)

    model = Regression(3, 1)
    optimizer = Optimizer(model.parameters(), lr=0.1, momentum=0.9)
    arguments = TrainingArguments(
        output_dir=config["output"], max_steps=2, save_steps=1, report_to=[], disable_tqdm=True
    )
    rows = [{"x": torch.ones(3), "labels": torch.ones(())}] * 40
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, schedule))
    prepare_trainer(trainer).train()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("model", "Regression: .*raised KeyError: 'kernel'"),
        ("optimizer", "Optimizer: .*raised KeyError: 'moments'"),
        (None, None),
    ],
)
def test_what_can_be_saved_and_not_loaded_fails_at_the_first_save(
    quiet: RunConfig, tmp_path: Path, part: str | None, message: str | None
) -> None:
    config = {"output": str(tmp_path), "part": part}
    if message is None:
        assert fit_with_library(quiet, saves_what_it_cannot_load, config, workers=1).checkpoint
        return
    with pytest.raises(TrainingFailedError, match=message):
        fit_with_library(quiet, saves_what_it_cannot_load, config, workers=1)


def saves_before_rank_0(config: dict[str, Any]) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from polytrain_torch.transformers import prepare_trainer

    rank = torch.distributed.get_rank()

    class Regression(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (super().forward(x)[:, 0] - labels).square().mean()}

    class SeesHalfAFile(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if rank == 1:
                file = Path(args.output_dir, f"checkpoint-{state.global_step}", "optimizer.pt")
                file.write_bytes(b"PK")

    arguments = TrainingArguments(
        output_dir=f"{config['output']}/{rank}",
        max_steps=1,
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"x": torch.ones(3), "labels": torch.ones(())}] * 16
    trainer = Trainer(Regression(3, 1), arguments, train_dataset=rows, callbacks=[SeesHalfAFile()])
    prepare_trainer(trainer).train()


def test_other_ranks_do_not_read_what_rank_0_may_still_write(
    quiet: RunConfig, tmp_path: Path
) -> None:
    result = fit_with_library(quiet, saves_before_rank_0, {"output": str(tmp_path)})
    assert result.restarts == 0
    assert result.checkpoint is not None


def train_apart(config: dict[str, Any]) -> list[Any]:
    """Each rank returns the model that it ends with."""
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

    class Normalised(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
            self.post_init()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(x).square().mean()}

    class Dies(TrainerCallback):
        """In the first attempt, on all ranks: none is left to ask for its state."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_first = polytrain.get_context().get_attempt() == 0
            if is_first and state.global_step == config["dies_after"]:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(3)
    trainer = Trainer(
        model=Normalised(PretrainedConfig()),
        args=TrainingArguments(
            output_dir=config["output"],
            num_train_epochs=config.get("epochs", 1),
            per_device_train_batch_size=config.get("batch_size", 4),
            ddp_broadcast_buffers=config["sends"],
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"x": row} for row in torch.arange(144.0).reshape(48, 3)],
        callbacks=[Dies()],
    )
    prepare_trainer(trainer).train()
    return [each.tolist() for each in trainer.model.state_dict().values()]


def test_what_differs_by_rank_comes_back_to_its_rank(quiet: RunConfig, tmp_path: Path) -> None:
    """BatchNorm's statistics. Where DDP sends them, any number of workers can resume."""

    def fit(name: str, *, dies_after: int = -1, sends: bool = False, **options: Any) -> Result:
        config = {"output": str(tmp_path / name), "dies_after": dies_after, "sends": sends}
        own = {each: options.pop(each) for each in ("epochs", "batch_size") if each in options}
        return fit_with_library(quiet, train_apart, {**config, **own}, **options)

    more = {"epochs": 2, "batch_size": 8, "workers": 1}
    undisturbed, killed = fit("undisturbed"), fit("killed", dies_after=4)
    assert killed.restarts == 1
    assert killed.return_values == undisturbed.return_values
    with pytest.raises(TrainingFailedError, match=r"model: each of the 2 workers"):
        fit("more", restore_from=killed.checkpoint, **more)
    sent = fit("sent", sends=True)
    assert fit("more sent", sends=True, restore_from=sent.checkpoint, **more).return_values
