"""Hugging Face's `Trainer` in a training function: its checkpoints are the run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polytrain import Checkpoint, get_checkpoint, report
from polytrain_torch.call_counter import Calls
from polytrain_torch.checkpoint_parts import checkpoint_of, part_of
from polytrain_torch.libraries import needed

with needed("transformers"):
    from transformers import Trainer, TrainerCallback

_FILE = "trained_by.json"
"""In a checkpoint, beside what the trainer has saved: by which call, and how."""

_calls = Calls("train()")


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Have a trainer report to the run, and resume from its checkpoint.

    What the trainer logs are the run's metrics. Whenever it saves, that is a checkpoint of the run;
    how often, its `TrainingArguments` say. After a restart, `trainer.train()` resumes from the
    newest, in the middle of an epoch too; its `resume_from_checkpoint` is for the first attempt.
    Of several calls of `train()`, the one goes on that has saved it; later ones begin.

    `train()` raises a ValueError if the newest checkpoint isn't one that it can resume from: of a
    later call, or with another number of rows in a step.

    Args:
        trainer: before `train()` is called. All ranks have one.

    Returns:
        The same trainer.
    """
    reports = ReportCallback()
    trainer.add_callback(reports)
    own_train = trainer.train

    def train(resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        reports.call = _calls.next()
        checkpoint = get_checkpoint()
        if checkpoint is not None and _is_resumed_from(checkpoint, reports.call, trainer.args):
            resume_from_checkpoint = checkpoint.path
        return own_train(resume_from_checkpoint, *args, **options)

    trainer.train = train
    return trainer


class ReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers' types aren't looked at
    """Reports what a trainer logs and saves. `prepare_trainer` adds one."""

    def __init__(self) -> None:
        self.call = 1
        """Which `train()` of this attempt it is."""

        self._held: dict[str, Any] = {}
        self._logged: dict[str, Any] = {}
        self._logged_step = -1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Report, unless a checkpoint is made in the same step: then with that."""
        self._held |= logs or {}
        self._logged, self._logged_step = dict(self._held), state.global_step
        if not control.should_save:
            self._report(None)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the checkpoint that has been saved."""
        if self._logged_step == state.global_step:
            # They are reported already if the trainer, keeping the best, has decided after them.
            self._held = self._logged
        directory = Path(args.output_dir, f"checkpoint-{state.global_step}")
        with part_of(directory) as part:
            if part is not None and dist.get_rank() == 0:
                made_by = {"call": self.call, "workers": dist.get_world_size()}
                (part / _FILE).write_text(json.dumps({**made_by, "rows_per_step": _rows(args)}))
            self._report(part)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report what hasn't been."""
        if self._held:
            self._report(None)

    def _report(self, part: Path | None) -> None:
        metrics, self._held = self._held, {}
        report(metrics, checkpoint_of(part))


def _is_resumed_from(checkpoint: Checkpoint, call: int, args: Any) -> bool:
    """Whether this call of `train()` resumes from the checkpoint, rather than begin.

    Raises:
        ValueError: it would neither be right.
    """
    file = Path(checkpoint.path, _FILE)
    if not file.exists():
        # Made by a trainer elsewhere.
        return True
    made_by = json.loads(file.read_text())
    resumes = _calls.resumes(call, made_by=made_by["call"])
    if resumes:
        _refuse_other_steps(made_by, args)
    return resumes


def _refuse_other_steps(made_by: Mapping[str, int], args: Any) -> None:
    """Trainers count an epoch's steps anew: with larger ones a run would seem to be nearly over."""
    workers, rows = dist.get_world_size(), _rows(args)
    same = rows == made_by["rows_per_step"] and not args.auto_find_batch_size
    if workers != made_by["workers"] and not same:
        raise ValueError(
            f"The checkpoint was made by {made_by['workers']} workers in steps of "
            f"{made_by['rows_per_step']} rows. {workers} workers with {rows} would take its steps "
            "for other epochs than they were. Keep ScalingConfig(num_workers=…) at "
            f"{made_by['workers']}, or the rows of a step: per_device_train_batch_size * "
            "gradient_accumulation_steps * workers, without auto_find_batch_size."
        )


def _rows(args: Any) -> int:
    """Of one step of the optimizer, over all workers."""
    rows: int = args.train_batch_size * args.gradient_accumulation_steps * dist.get_world_size()
    return rows
