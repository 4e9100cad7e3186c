"""Every field of `TrainingArguments` that touches data or saving, on two workers.

Killed once in mid-epoch, the weights at the end are compared with those of an uninterrupted run, to
the last bit; and without a kill with those of plain Transformers in one process, which takes the
rows of both workers in a step. The table in `docs/transformers.md` has the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.losses import lose_all_ranks
from tests.e2e.torch_runs import HUGGING_FACE, equal
from tests.e2e.torch_tables import table
from tests.sweeps import only_in_sweep
from transformers import TrainingArguments

from polytrain import Result, RunConfig

fit_with_library = partial(torch_runs.fit, libraries=HUGGING_FACE)

_PROCESS = {"dataloader_num_workers": 1}
_EVALUATION = {"eval_strategy": "steps", "eval_steps": 4}

FIELDS: dict[str, dict[str, Any]] = {
    "accelerator_config(dispatch_batches=True)": {"accelerator_config": {"dispatch_batches": True}},
    "accelerator_config(even_batches=False)": {"accelerator_config": {"even_batches": False}},
    "accelerator_config(split_batches=True)": {"accelerator_config": {"split_batches": True}},
    "accelerator_config(use_seedable_sampler=False)": {
        "accelerator_config": {"use_seedable_sampler": False}
    },
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "data_seed": {"data_seed": 7},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "dataloader_in_order": {**_PROCESS, "dataloader_in_order": False},
    "dataloader_multiprocessing_context": {
        **_PROCESS,
        "dataloader_multiprocessing_context": "fork",
    },
    "dataloader_num_workers": _PROCESS,
    "dataloader_persistent_workers": {**_PROCESS, "dataloader_persistent_workers": True},
    "dataloader_pin_memory": {"dataloader_pin_memory": False},
    "dataloader_prefetch_factor": {**_PROCESS, "dataloader_prefetch_factor": 3},
    "eval_on_start": {**_EVALUATION, "eval_on_start": True},
    "eval_strategy": _EVALUATION,
    "full_determinism": {"full_determinism": True},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "ignore_data_skip": {"ignore_data_skip": True},
    "length_column_name": {
        "train_sampling_strategy": "group_by_length",
        "length_column_name": "length",
    },
    "load_best_model_at_end": {**_EVALUATION, "load_best_model_at_end": True},
    "max_steps": {"max_steps": 17},
    "num_train_epochs": {"num_train_epochs": 2},
    "output_dir": {},
    "per_device_train_batch_size": {"per_device_train_batch_size": 3},
    "remove_unused_columns": {"remove_unused_columns": False},
    "restore_callback_states_from_checkpoint": {"restore_callback_states_from_checkpoint": True},
    "save_on_each_node": {"save_on_each_node": True},
    "save_only_model": {"save_only_model": True},
    "save_steps": {"save_steps": 3},
    "save_strategy": {"save_strategy": "epoch"},
    "save_total_limit": {"save_total_limit": 1},
    "seed": {"seed": 7},
    "train_sampling_strategy": {"train_sampling_strategy": "sequential"},
    "train_sampling_strategy(group_by_length)": {"train_sampling_strategy": "group_by_length"},
}


def train(config: dict[str, Any]) -> None:
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

    class Regression(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
            )
            self.post_init()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            predicted = self.layers(input_ids)[:, 0]
            return {"loss": (predicted - labels).square().mean(), "logits": predicted}

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            context = polytrain.get_context()
            if context.get_attempt() or state.global_step != config["dies_at"]:
                return
            lose_all_ranks()

    class Rows(torch.utils.data.Dataset[Any]):
        column_names = ("input_ids", "labels", "length")

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, str):
                return [len(each) for each in x]
            return {"input_ids": x[index], "labels": x[index].sum()}

        def __len__(self) -> int:
            return len(x)

    x = torch.arange(144.0).reshape(48, 3) / 144
    torch.manual_seed(1)
    options = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "save_steps": 4,
        **config["options"],
    }
    arguments = TrainingArguments(
        output_dir=config["output"], report_to=[], disable_tqdm=True, learning_rate=0.01, **options
    )
    trainer = Trainer(
        model=Regression(PretrainedConfig()),
        args=arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=[Dies()],
    )
    prepare_trainer(trainer).train()
    if polytrain.get_context().get_world_rank() == 0:
        torch.save(trainer.model.state_dict(), Path(config["output"], "weights.pt"))


def trained(quiet: RunConfig, output: Path, field: str, *, dies_at: int = -1) -> Result:
    output.mkdir()
    config = {"output": str(output), "options": FIELDS[field], "dies_at": dies_at}
    return fit_with_library(quiet, train, config)


TABLE = table("transformers.md", "field of `TrainingArguments`")

IN_TEST = ("gradient_accumulation_steps", "train_sampling_strategy(group_by_length)")
"""Fields that `make test` tries too."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "field", [field if field in IN_TEST else only_in_sweep(field, id=field) for field in FIELDS]
)
def test_fields_are_what_the_table_says(quiet: RunConfig, tmp_path: Path, field: str) -> None:
    trained(quiet, tmp_path / "undisturbed", field)
    killed = trained(quiet, tmp_path / "killed", field, dies_at=9)
    assert killed.restarts == 1
    weights = [
        torch.load(tmp_path / name / "weights.pt", weights_only=True)
        for name in ("undisturbed", "killed")
    ]
    assert ("exact" if equal(*weights) else "differs") == TABLE[field]


def without_dropout(
    options: Mapping[str, Any], output: Path, *, rows: int, prepares: bool
) -> list[float]:
    """The weights after training on shuffled rows.

    Args:
        options: fields, as above.
        output: a directory.
        rows: in a batch of this process.
        prepares: whether the trainer is prepared for the run.
    """
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    from polytrain_torch.transformers import prepare_trainer

    class Regression(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )
            self.post_init()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            predicted = self.layers(input_ids)[:, 0]
            return {"loss": (predicted - labels).square().mean(), "logits": predicted}

    class Rows(torch.utils.data.Dataset[Any]):
        column_names = ("input_ids", "labels", "length")

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, str):
                return [len(each) for each in x]
            return {"input_ids": x[index], "labels": x[index].sum()}

        def __len__(self) -> int:
            return len(x)

    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    arguments = TrainingArguments(
        output_dir=str(output),
        report_to=[],
        disable_tqdm=True,
        learning_rate=0.1,
        optim="sgd",
        use_cpu=True,
        **{"num_train_epochs": 3, "save_steps": 4, **options, "per_device_train_batch_size": rows},
    )
    trainer = Trainer(
        model=Regression(PretrainedConfig()),
        args=arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
    )
    (prepare_trainer(trainer) if prepares else trainer).train()
    torch.use_deterministic_algorithms(False)
    return [float(each) for weight in trainer.model.parameters() for each in weight.flatten()]


def rows_of(field: str) -> int:
    """Rows in a worker's batch."""
    return int(FIELDS[field].get("per_device_train_batch_size", 4))


def trains_without_dropout(config: dict[str, Any]) -> None:
    import polytrain

    found = {}
    for number, (field, (options, rows)) in enumerate(config["fields"].items()):
        output = Path(config["output"], str(number))
        found[field] = without_dropout(options, output, rows=rows, prepares=True)
        if field == DRAWS_BY_WORKERS:
            found["plain"] = without_dropout(options, output, rows=rows, prepares=False)
    polytrain.report(found)


SPLITS = "accelerator_config(split_batches=True)"
"""With it, a batch has the rows of all workers."""

DRAWS_BY_WORKERS = "accelerator_config(use_seedable_sampler=False)"
"""With it, two workers draw another order than one: plain Transformers runs on two, too."""


# `test_row_weights` compares it with one process in `make test`.
@pytest.mark.sweep
@pytest.mark.only_in_sweep
@pytest.mark.parametrize("part", range(6))
def test_two_workers_end_where_plain_transformers_ends(
    quiet: RunConfig, tmp_path: Path, part: int
) -> None:
    """Each part has every sixth field: all of them would take too long for a test."""
    names = [*FIELDS][part::6]
    fields = {name: (FIELDS[name], rows_of(name)) for name in names}
    config = {"output": str(tmp_path), "fields": fields}
    found = fit_with_library(quiet, trains_without_dropout, config).metrics
    for name in names:
        rows = rows_of(name) * (1 if name == SPLITS else 2)
        if name == DRAWS_BY_WORKERS:
            plain = found["plain"]
        else:
            plain = without_dropout(FIELDS[name], tmp_path / name, rows=rows, prepares=False)
        np.testing.assert_allclose(found[name], plain, atol=1e-5, err_msg=name)


def test_the_table_has_every_field() -> None:
    """Those that name data, sampling, seeds, steps and saving."""
    named = {
        field
        for field in TrainingArguments.__dataclass_fields__
        if field.startswith(("dataloader_", "save_", "train_sampling", "data_"))
    }
    assert named <= TABLE.keys() == FIELDS.keys()
