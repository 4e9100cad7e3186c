"""Hugging Face's `Trainer` in a training function: its checkpoints are the run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polytrain import get_checkpoint, report
from polytrain_torch.libraries import needed
from polytrain_torch.saved import checkpoint_of, part_of

with needed("transformers"):
    from transformers import Trainer, TrainerCallback


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Have a trainer report to the run, and go on from its checkpoint.

    What the trainer logs are the run's metrics. Whenever it saves, that is a checkpoint of the run;
    how often, its `TrainingArguments` say. After a restart, `trainer.train()` goes on from the
    newest, in the middle of an epoch too; its `resume_from_checkpoint` is for the first attempt.

    Args:
        trainer: before `train()` is called. All ranks have one.

    Returns:
        The same trainer.
    """
    trainer.add_callback(ReportCallback())
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        own_train = trainer.train

        def train(resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
            return own_train(checkpoint.path, *args, **options)

        trainer.train = train
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
        # Every rank has written something, if only its random numbers.
        with part_of(directory) as part:
            self._report(part)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report what hasn't been."""
        if self._held:
            self._report(None)

    def _report(self, part: Path | None) -> None:
        metrics, self._held = self._held, {}
        report(metrics, checkpoint_of(part))
