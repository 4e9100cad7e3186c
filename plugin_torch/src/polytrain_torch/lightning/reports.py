"""Reports a Lightning trainer's metrics and checkpoints, and finds a `fit`'s checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from polytrain import get_checkpoint, get_context, report
from polytrain.extension import Calls
from polytrain_torch.checkpoints.parts import checkpoint_of, part_of
from polytrain_torch.checkpoints.rank_states import save_rank_states
from polytrain_torch.checkpoints.read_back import is_first_save
from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.collectives.stopping import any_rank
from polytrain_torch.lightning.best_model import SavedFiles
from polytrain_torch.lightning.callbacks import (
    prepare_callbacks,
    save_found,
    save_trained,
    take_over_found,
)
from polytrain_torch.lightning.first_save import read_back, refuse_unsafe
from polytrain_torch.lightning.loggers import KeptLogs
from polytrain_torch.lightning.private import (
    Logged,
    begin_next_epoch,
    end_as_any_epoch,
    is_ending_batch,
    is_ending_epoch,
    steps_logged,
    update_by_metrics,
)
from polytrain_torch.lightning.rank_parts import restore_rank_parts, save_rank_parts
from polytrain_torch.lightning.savers import all_saved_last, save_others, set_all_saved_last
from polytrain_torch.randomness import restore_random_states

CHECKPOINT_FILE = "lightning.ckpt"
_FIT_FILE = "fit"
_LOGGED_FILE = "logged.pt"
"""File in a checkpoint: what is known of it beside what Lightning saves."""

LEFT_FILE = "end-of-batch.pt"
"""File in a checkpoint from within a batch's end: what was left of it, and what rank 0 knows."""

VALIDATES = "validates"
"""What is left of a batch: its validation, and what follows."""

_BATCHES_FILE = "batches"
"""File in a checkpoint: how many batches of its epoch were taken."""

SEARCH = 0
"""Number of a `fit` in which Lightning's `Tuner` searches."""

fits = Calls("fit()")

_Moment = tuple[int, bool]
"""A step; and whether a checkpoint is from after its validation, or a report from its epoch's end.
"""

_NEVER: _Moment = (-1, False)

_Steps = tuple[_Moment, _Moment, bool, bool]
"""When the last checkpoint and report were made, and what is known of the time since then.

That is whether the model was validated, and whether a value of an epoch was logged so far.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What a checkpoint has beside Lightning's, for a `fit` that resumes from it."""

    ranks: Sequence[Mapping[str, Any]]
    """What each rank has logged, and whether it was about to stop."""

    reports: _Steps
    saved_last: Mapping[str, Mapping[str, Any]]
    """What each `ModelCheckpoint` knows of its last save."""

    is_epoch_over: bool
    is_ending_epoch: bool
    """Whether a hook at the epoch's end has saved it."""

    @classmethod
    def of(cls, checkpoint: Path | None) -> _Known | None:
        """Return what a checkpoint has; None if there is none, or Lightning alone has saved it."""
        file = None if checkpoint is None else checkpoint / _LOGGED_FILE
        return cls(**loaded(file)) if file is not None and file.exists() else None

    @property
    def own(self) -> Mapping[str, Any]:
        """What this rank has logged.

        On another number of ranks it is what rank 0 has, and means over an epoch begin anew.
        """
        if len(self.ranks) != dist.get_world_size():
            return {**self.ranks[0], "sums": {}}
        return self.ranks[dist.get_rank()]

    @property
    def stops(self) -> bool:
        """Whether the training was about to stop."""
        return any(each["should_stop"] for each in self.ranks)


class Reports(Callback):
    """Reports the epochs and the checkpoints of a trainer's calls of `fit`."""

    def __init__(self) -> None:
        self._saved = self._reported = _NEVER
        self.is_training = False
        self.fit = 0
        """Number of the call of `fit` in the training function."""
        self.has_validated = False
        """Whether the model has been validated since the last batch."""
        self._is_epoch_over = False
        self._step_before = -1
        """The step before the current batch."""
        self.loads_anything = False
        """Whether the user trusts checkpoints that hold more than plain data."""
        self._search_again: Callable[[], None] = lambda: None
        self.logs: KeptLogs | None = None
        """Logs of earlier attempts, until the repeated steps are dropped from them."""
        self.restore_parts: Callable[[Any, Path], None] = restore_rank_parts
        """Restores what differs by rank in the checkpoint that a `fit` resumes from."""
        self._resumed: _Known | None = None
        """What the checkpoint has that a `fit` resumes from, until the training continues."""
        self._stops = False
        """Whether the training that a `fit` resumes was about to stop, until it is."""
        self._has_means = False
        """Whether any rank has logged a value of an epoch so far; a restart may lack its metric."""
        self._newest = Path()
        """What was last saved."""
        self._files = SavedFiles(file=CHECKPOINT_FILE, fit_file=_FIT_FILE)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        # By now the module has added its own callbacks, and no finder has searched.
        if stage == "fit" and self.fit != SEARCH:
            prepare_callbacks(trainer.callbacks)
            self._search_again = take_over_found(trainer.callbacks, checkpoint_of_fit(self.fit))

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        resumed = checkpoint_of_fit(self.fit) if trainer.state.fn == "fit" else None
        if resumed is not None and (resumed / _FIT_FILE).exists():
            self._files.restore(trainer, checkpoint, resumed)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._resumed = _Known.of(checkpoint_of_fit(self.fit))
        self._stops = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.is_training = True
        self._saved = self._reported = _NEVER
        # Not earlier: the validation sanity check draws random numbers too.
        checkpoint = checkpoint_of_fit(self.fit)
        if checkpoint is not None:
            self.restore_parts(trainer, checkpoint)
            restore_random_states(checkpoint)
            self._saved = self._reported = (trainer.global_step, True)
            if self._resumed is not None:
                self.steps = self._resumed.reports
                set_all_saved_last(trainer, self._resumed.saved_last)
                if self._resumed.is_ending_epoch:
                    update_by_metrics(trainer)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self._is_epoch_over = self.has_validated = False
        self._step_before = trainer.global_step
        self.drop_repeated_logs(steps_logged(trainer))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.has_validated = True

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._is_epoch_over = True
        trainer.end_epoch()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.drop_repeated_logs(steps_logged(trainer))
        self.report_epoch(trainer)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        # Checkpoints from here on would lack a taken batch, and other ranks may not save.
        self.is_training = False

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.is_training = False
        self._search_again()

    def saved(self, trainer: Any, saved: Path) -> None:
        """Report a checkpoint, if it is the first one of its step, or of its step's validation."""
        self._newest, step = saved, trainer.global_step
        self._files.add(saved, step)
        # While gradients are added up, an earlier checkpoint of the step lacks none of them.
        at = (step, self.has_validated and step > self._step_before)
        if self._saved in (at, (step, True)):
            return
        self._saved, self._reported = at, (step, self._is_epoch_over)
        # The first file lacks what callbacks know that save after this one. They save now.
        save_others(trainer, saved)
        saved = self._newest
        # Only rank 0 has surely written these files: others don't wait for its thread.
        if not self.loads_anything and is_first_save(self) and dist.get_rank() == 0:
            refuse_unsafe(saved)
            read_back(saved, trainer)
        with part_of(saved, name=CHECKPOINT_FILE) as part:
            save_rank_states(part)
            save_rank_parts(trainer, part)
            logged = Logged(trainer)
            own = {
                "shown": logged.shown(),
                "sums": {} if self._is_epoch_over else logged.sums(),
                "has_means": logged.are_of_epochs,
                "should_stop": bool(trainer.should_stop),
            }
            ranks = gathered(own)
            self._has_means |= any(each["has_means"] for each in ranks)
            if part is not None and dist.get_rank() == 0:
                self._files.forget_unused(trainer)
                self._write(trainer, part, ranks)
            report(logged_metrics(trainer), checkpoint_of(part))

    def _write(self, trainer: Any, part: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
        known = _Known(
            ranks=ranks,
            reports=self.steps,
            saved_last=all_saved_last(trainer),
            is_epoch_over=self._is_epoch_over,
            is_ending_epoch=self._is_epoch_over and is_ending_epoch(trainer),
        )
        save_safely(asdict(known), part / _LOGGED_FILE)
        self.write_beside(trainer, part, self.files_saved, batches=batches_of(trainer))
        if is_ending_batch(trainer) and not self._is_epoch_over:
            left = {"left": VALIDATES, "reports": self.steps, "should_stop": known.stops}
            save_safely(left, part / LEFT_FILE)

    def resume_logged(self, trainer: Any) -> None:
        """Continue what was logged, after the sanity check, which drops it."""
        known = self._resumed
        if known is None:
            return
        Logged(trainer).show(known.own["shown"])
        # A run that begins with another one's checkpoint decides for itself.
        self._stops = known.stops and get_context().get_attempt() > 0
        if known.is_epoch_over:
            self.continue_stop(trainer)
            begin_next_epoch(trainer, has_begun=not known.is_ending_epoch)

    @property
    def files_saved(self) -> dict[str, int]:
        """The steps at which files were saved, by their paths."""
        return dict(self._files.steps)

    @property
    def steps(self) -> _Steps:
        """When the last checkpoint and report were made."""
        return self._saved, self._reported, self.has_validated, self._has_means

    @steps.setter
    def steps(self, steps: _Steps) -> None:
        self._saved, self._reported, self.has_validated, self._has_means = steps

    def continue_means(self, trainer: Any) -> None:
        """Continue the means over a resumed epoch, which is about to continue."""
        known, self._resumed = self._resumed, None
        if known is not None:
            # Other checkpoints lack the metrics that schedulers monitor.
            end_as_any_epoch(trainer)
            Logged(trainer).restore_sums(known.own["sums"])

    def continue_stop(self, trainer: Any) -> None:
        """Stop if the training was about to, after what is left of the resumed batch."""
        trainer.should_stop, self._stops = trainer.should_stop or self._stops, False

    def continue_stop_after_validation(self, trainer: Any) -> None:
        """Before a batch, stop if the checkpoint is from the last one's validation.

        Lightning validates wherever it stops. It takes no batch after such a checkpoint only if it
        knows that one was due.
        """
        if self.has_validated:
            self.continue_stop(trainer)

    def batches_taken(self, trainer: Any) -> int:
        """Return how many batches of the epoch were taken, also before Lightning resumes its loops.

        It does after `configure_optimizers`, where the length of an epoch may already be needed.
        """
        taken = batches_of(trainer)
        # A loader that is replaced in training has no part in the checkpoint that was resumed.
        checkpoint = None if taken or self.is_training else checkpoint_of_fit(self.fit)
        file = None if checkpoint is None else checkpoint / _BATCHES_FILE
        if file is None or not file.exists():
            return taken
        return int(file.read_text())

    def write_beside(
        self, trainer: Any, part: Path, files_saved: Mapping[str, int], *, batches: int
    ) -> None:
        """Write what a checkpoint of the run has beside Lightning's."""
        (part / _FIT_FILE).write_text(str(self.fit))
        (part / _BATCHES_FILE).write_text(str(batches))
        self._files.write(part, files_saved)
        save_found(trainer.callbacks, part)
        save_trained(trainer, part)

    def drop_repeated_logs(self, step: int) -> None:
        """Drop what earlier attempts have logged from a step on, once."""
        logs, self.logs = self.logs, None
        if logs is not None:
            logs.drop_from(step)

    def report_epoch(self, trainer: Any) -> None:
        """Report the last epoch, unless a checkpoint at its end has reported it.

        One that is saved within its last batch lacks its means, and maybe its validation.
        """
        step, (reported, is_whole) = trainer.global_step, self._reported
        if step == 0 or (reported == step and is_whole):
            return
        lacks_validation = self.has_validated and self._saved != (step, True)
        # A rank may log what others don't, but all report alike.
        self._has_means = any_rank(self._has_means or Logged(trainer).are_of_epochs)
        if reported != step or lacks_validation or self._has_means:
            self._reported = step, True
            report(logged_metrics(trainer))


def logged_metrics(trainer: Any) -> dict[str, Any]:
    """Return a trainer's logged metrics, with its epoch and step."""
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {**logged, "epoch": trainer.current_epoch, "step": trainer.global_step}


def batches_of(trainer: Any) -> int:
    """Return how many batches of the epoch Lightning has counted."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def checkpoint_of_fit(fit: int) -> Path | None:
    """Return the directory of the checkpoint that a fit resumes from; None if it starts fresh.

    A search never resumes.

    Raises:
        ValueError: a later call of `fit` saved it.
    """
    checkpoint = get_checkpoint()
    if checkpoint is None or fit == SEARCH:
        return None
    directory = Path(checkpoint.path)
    file = directory / _FIT_FILE
    # A checkpoint without this file may come from elsewhere.
    made_by = int(file.read_text()) if file.exists() else fit
    return directory if fits.resumes(fit, made_by=made_by) else None
