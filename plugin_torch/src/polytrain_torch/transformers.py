"""Hugging Face's `Trainer` in a training function: its checkpoints are the run's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from polytrain import Checkpoint, get_checkpoint, get_context, report


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Have a trainer report to the run, and go on from its checkpoint.

    What the trainer logs are the run's metrics. Whenever it saves, that is a checkpoint of the run;
    how often, its `TrainingArguments` say. After a restart, `trainer.train()` goes on from the
    newest, in the middle of an epoch too.

    Args:
        trainer: before `train()` is called. All ranks have one.

    Returns:
        The same trainer.
    """
    trainer.add_callback(ReportCallback())
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        trainer.train = partial(trainer.train, resume_from_checkpoint=checkpoint.path)
    return trainer


class ReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers' types aren't looked at
    """Reports what a trainer logs and saves. `prepare_trainer` adds one."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Report, unless a checkpoint is made in the same step: then with that."""
        self._held |= logs or {}
        if not control.should_save:
            self._report(None)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the checkpoint that has been saved."""
        directory = Path(args.output_dir, f"checkpoint-{state.global_step}")
        # Every rank has written a part of it, if only its random numbers.
        names = _everybodys_files(directory)
        if not get_context().every_rank_writes():
            self._report(directory if dist.get_rank() == 0 else None)
            return
        with _linked(directory, _mine(names)) as part:
            self._report(part)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report what hasn't been."""
        if self._held:
            self._report(None)

    def _report(self, directory: Path | None) -> None:
        metrics, self._held = self._held, {}
        report(
            metrics,
            checkpoint=None if directory is None else Checkpoint.from_directory(str(directory)),
        )


def _everybodys_files(directory: Path) -> list[set[str]]:
    """By rank, the files that it sees. Of the ranks of a node, the first sees all."""
    files: set[str] = set()
    if get_context().get_local_rank() == 0 and directory.is_dir():
        files = {
            str(each.relative_to(directory)) for each in directory.rglob("*") if each.is_file()
        }
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, files)
    return everybodys


def _mine(everybodys: Sequence[set[str]]) -> set[str]:
    """Those that no lower rank sees: each file is in the checkpoint once."""
    rank = dist.get_rank()
    return everybodys[rank].difference(*everybodys[:rank])


@contextmanager
def _linked(directory: Path, names: set[str]) -> Iterator[Path]:
    """A directory with some of another's files."""
    # Beside it, for links don't go from one file system to another.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".part-") as name:
        part = Path(name)
        for each in names:
            (part / each).parent.mkdir(parents=True, exist_ok=True)
            os.link(directory / each, part / each)
        yield part
