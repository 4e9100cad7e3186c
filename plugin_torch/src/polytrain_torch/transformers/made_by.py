"""Which call of `train()` made a checkpoint, and whether another call resumes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from polytrain.extension import Calls
from polytrain_plugins import Batches

if TYPE_CHECKING:
    from polytrain_torch.transformers.trainer import ReportCallback

from transformers import Trainer

calls = Calls("train()")

SUMS = "sums"
"""Kind and name of what a trainer adds up for its logs, among the states that differ by rank."""

LEFT = "left"
"""Name of what a checkpoint leaves of the end of a step or an epoch."""

_FILE = "trained_by.json"
"""File beside the trainer's in a checkpoint: the call that saved it, and its rows per step."""


def write_made_by(
    directory: Path,
    reports: ReportCallback,
    args: Any,
    *,
    sums: Mapping[str, Any] | None = None,
    left: Mapping[str, Any] | None = None,
) -> None:
    """Write which call saves the trainer's files in a directory, and its rows per step.

    Args:
        directory: where to.
        reports: the callback that reports the checkpoint.
        args: the trainer's `TrainingArguments`.
        sums: what it has added up for its logs, on rank 0; None if that is elsewhere.
        left: what the checkpoint leaves of the end of a step or an epoch; None likewise.
    """
    content = {
        "call": reports.call,
        "workers": dist.get_world_size(),
        "rows_per_step": _rows(args),
        "batches_per_epoch": reports.batches_per_epoch,
        SUMS: sums,
        LEFT: left,
    }
    (directory / _FILE).write_text(json.dumps(content))


def made_by(directory: Path) -> Mapping[str, Any] | None:
    """Return what `write_made_by` has written; None if another trainer saved the files."""
    file = directory / _FILE
    if not file.exists():
        return None
    content: Mapping[str, Any] = json.loads(file.read_text())
    return content


def is_resumed_from(directory: Path, call: int, trainer: Trainer) -> bool:
    """Whether this call of `train()` resumes from a trainer's files; otherwise it starts fresh.

    Raises:
        ValueError: it can do neither: a later call saved them, or its steps differ.
    """
    then = made_by(directory)
    if then is None:
        return True
    resumes = calls.resumes(call, made_by=then["call"])
    if resumes and isinstance(trainer.train_dataset, Batches):
        _check_epoch(then, trainer.train_dataset)
    elif resumes:
        _check_steps(then, trainer.args)
    return resumes


def epoch_of(dataset: Any) -> int | None:
    """Return a shard's batches per epoch; None if unknown, or for another data set."""
    if not isinstance(dataset, Batches):
        return None
    try:
        return len(dataset)
    except TypeError:
        return None


def _check_epoch(then: Mapping[str, Any], dataset: Any) -> None:
    """Check that epochs have the same length: trainers derive the epoch from the step.

    Raises:
        ValueError: the checkpoint was made with another number of batches per epoch.
    """
    before, now = then.get("batches_per_epoch"), epoch_of(dataset)
    if before != now:
        before, after = before or "an unknown number of", now or "an unknown number"
        raise ValueError(
            f"The checkpoint was made in epochs of {before} batches of a shard, and train_dataset "
            f"now has {after}. Transformers would resume at a different place in the data. Keep "
            "the rows of all workers' batches: iter_torch_batches(batch_size=…) * "
            "ScalingConfig(num_workers=…)."
        )


def _check_steps(then: Mapping[str, Any], args: Any) -> None:
    """Check that steps have the same number of rows: trainers derive the epoch from the step.

    Raises:
        ValueError: the number differs.
    """
    workers, rows = dist.get_world_size(), _rows(args)
    same = rows == then["rows_per_step"] and not args.auto_find_batch_size
    if workers != then["workers"] and not same:
        raise ValueError(
            f"The checkpoint was made by {then['workers']} workers in steps of "
            f"{then['rows_per_step']} rows. {workers} workers in steps of {rows} rows would "
            "resume at a different place in the data. Keep ScalingConfig(num_workers=…) at "
            f"{then['workers']}, or keep the rows of a step: per_device_train_batch_size * "
            "gradient_accumulation_steps * workers, without auto_find_batch_size."
        )


def _rows(args: Any) -> int:
    """Return the rows of one optimizer step, over all workers."""
    rows: int = args.train_batch_size * args.gradient_accumulation_steps * dist.get_world_size()
    return rows
