"""Keeps the state at the end of each batch of a `fit`, and continues there after a loss of a rank.

A batch ends with checkpoints and a validation, and the last one with the end of its epoch. The
state is kept before the checkpoints, with what is still to be done, and again when more of it is
done. A restart loads the state as Lightning loads a checkpoint, and then does what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from polytrain.extension import survivor
from polytrain_torch.checkpoints.rank_parts import (
    Differences,
    found_beside,
    own_states,
    refuse_other_ranks,
    write_found,
)
from polytrain_torch.checkpoints.read_back import is_first_save
from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely
from polytrain_torch.libraries import needed
from polytrain_torch.models.parallel import prepared_models
from polytrain_torch.randomness import restore_random_states
from polytrain_torch.survivors import keeper
from polytrain_torch.survivors.keeper import Keeper
from polytrain_torch.survivors.kept_by_rank import State
from polytrain_torch.survivors.point_writer import Files

if TYPE_CHECKING:
    from polytrain_torch.lightning.loaders import PlacedLoader
    from polytrain_torch.lightning.trainer import Trainer

with needed("lightning"):
    from lightning.pytorch.callbacks import Callback, Checkpoint
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from polytrain_torch.lightning.attributes import Attributes, unsuitable
    from polytrain_torch.lightning.first_save import read_back
    from polytrain_torch.lightning.private import (
        Logged,
        accumulates,
        complete_batch,
        end_of_batch,
        ending_batch,
        forget_restart,
        is_at_limit,
        steps_logged,
        whole_checkpoint,
    )
    from polytrain_torch.lightning.reports import (
        CHECKPOINT_FILE,
        LEFT_FILE,
        SEARCH,
        VALIDATES,
        Reports,
    )
    from polytrain_torch.lightning.savers import all_saved_last, set_all_saved_last

_CALLBACKS = "callbacks"

_SAVES = "saves"
"""What is left of a batch: its checkpoints, its validation, and what follows."""

_ENDS = "ends"
"""Nothing is left of the batch: the next one comes, or the end of the epoch."""

_BETWEEN = "between"
"""Nothing is left of the epoch."""


def leaves_something(checkpoint: Path) -> bool:
    """Whether a checkpoint is from within a batch's end.

    A survivor has written it, or Lightning in a hook.
    """
    return (checkpoint / LEFT_FILE).exists()


class KeptBatches(Callback):
    """Keeps the state of one trainer. It comes just before the callbacks that save."""

    def __init__(
        self,
        reports: Reports,
        *,
        loaders: Callable[[], Sequence[PlacedLoader]],
        end_epoch: Callable[[], Any],
    ) -> None:
        """
        Args:
            reports: the callback that reports the trainer's checkpoints.
            loaders: returns the loaders of the training whose places checkpoints have.
            end_epoch: after an epoch's last batch, has them continue with the next epoch.
        """
        self._reports = reports
        self._loaders = loaders
        self._end_epoch = end_epoch
        self._keeper: Keeper | None = None
        self._has_hook = False
        """Whether the module does something at the end of a batch, after the checkpoints."""

        self._kept_at = -1
        """How many reports there were when the state was last kept."""

        self._saved: State = {}
        """What a checkpoint has left to do; empty if nothing."""

        self._directory = Path()
        self._limits: tuple[Any, ...] = ()
        """The last epoch and step, until the training continues: they may be lifted."""

    def attach(self, trainer: Trainer) -> None:
        """Take part in a trainer's steps."""
        strategy = trainer.strategy
        strategy.training_step = self._around_training_step(trainer, strategy.training_step)
        strategy.optimizer_step = self._around_optimizer_step(strategy.optimizer_step)

    # After a restart

    def resume(self, checkpoint: Path) -> None:
        """Continue from within a batch's end, in the `fit` that is about to begin."""
        self._saved, self._directory = loaded(checkpoint / LEFT_FILE), checkpoint
        if self._is_of_survivor:
            self._reports.restore_parts = self._restore

    @property
    def _is_of_survivor(self) -> bool:
        """Whether a survivor has written the checkpoint, and not Lightning."""
        return "own" in self._saved

    def lift_limits(self, trainer: Trainer) -> None:
        """Have a training that had reached its last step do what is left of it."""
        if self._saved and not self._limits:
            loop = trainer.fit_loop
            self._limits = loop.max_epochs, loop.epoch_loop.max_steps
            if is_at_limit(trainer):
                loop.max_epochs = loop.epoch_loop.max_steps = -1
            if not self._is_of_survivor:
                complete_batch(trainer)

    def _restore(self, trainer: Any, checkpoint: Path) -> None:
        """Restore what differs by rank, after Lightning has loaded rank 0's."""
        found = found_beside(checkpoint)
        parts = _parts(trainer)
        whole: State = {"parts": dict.fromkeys(parts), "own": self._saved["own"]}
        if found is not None:
            if found["ranks"] != dist.get_world_size():
                # Means over the epoch begin anew, as after any of Lightning's checkpoints.
                self._saved["own"]["logged"]["results"] = {}
                refuse_other_ranks(
                    [name for name in found["names"].get("parts", ()) if name != _CALLBACKS], found
                )
            whole = own_states(whole, found, checkpoint)
            for name, state in whole["parts"].items():
                if state is not None:
                    parts[name].load_state_dict(state)
        self._saved["own"] = whole["own"]

    def continue_epochs(self, trainer: Trainer) -> None:
        """Begin the next epoch if the last one was over."""
        if not self._saved:
            return
        trainer.fit_loop.max_epochs = self._limits[0]
        if self._saved["left"] == _BETWEEN:
            forget_restart(trainer)
            self._restore_known(trainer)
            self._saved = {}

    def continue_batches(self, trainer: Trainer, fetcher: Any) -> None:
        """Do what is left of the last batch."""
        if not self._saved:
            return
        left = self._saved["left"]
        forget_restart(trainer)
        self._restore_known(trainer)
        self._saved = {}
        restore_random_states(self._directory)
        if left == _SAVES:
            self._reports.drop_repeated_logs(steps_logged(trainer))
            index = trainer.fit_loop.epoch_loop.batch_idx
            with ending_batch(trainer):
                for each in trainer.checkpoint_callbacks:
                    each.on_train_batch_end(trainer, trainer.lightning_module, None, None, index)
            end_of_batch(trainer)
        elif left == VALIDATES:
            self._reports.drop_repeated_logs(steps_logged(trainer) + 1)
        if left != _ENDS:
            trainer.fit_loop.epoch_loop.on_advance_end(fetcher)

    def _restore_known(self, trainer: Trainer) -> None:
        saved = self._saved
        own = saved["own"] if self._is_of_survivor else saved
        trainer.fit_loop.epoch_loop.max_steps = self._limits[1]
        if self._is_of_survivor:
            Logged(trainer).restore(own["logged"])
            set_all_saved_last(trainer, saved["saved_last"])
        trainer.should_stop = own["should_stop"]
        self._reports.steps = saved["reports"]

    # Called by the training

    def begin(self, trainer: Trainer) -> None:
        """Begin to keep the state of a `fit` whose state is restored."""
        self._keeper = None
        if self._reports.fit == SEARCH:
            return
        why_not = unsuitable(trainer, fit=self._reports.fit, loaders=self._loaders())
        if why_not is not None:
            survivor().keep_nothing(why_not)
            return
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            prepared_models.add(model)
        self._go_before_checkpoints(trainer.callbacks)
        self._has_hook = is_overridden("on_train_batch_end", trainer.lightning_module)
        self._keeper = keeper.start(
            Keeper(
                _parts(trainer),
                {},
                files=self._files(trainer),
                whose="the module",
                by_batch=False,
                carried=Attributes(trainer).carried,
                needs_own=True,
            )
        )
        self._keep(trainer, _BETWEEN)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Note that an optimizer is about to change the parameters."""
        if self._keeper is not None:
            self._keeper.before_step(getattr(optimizer, "optimizer", optimizer))

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Keep the state, before callbacks save it."""
        if self._keeper is None or accumulates(trainer):
            return
        self._keeper.expect_step()
        if not self._has_hook:
            self._keep(trainer, _SAVES)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """Keep nothing of other calls of the trainer."""
        self._keeper = None

    def before_end(self, trainer: Trainer) -> None:
        """Keep the state before a validation, if checkpoints have been saved since."""
        is_due = self._has_hook or survivor().place().step != self._kept_at
        if self._keeper is not None and is_due and not accumulates(trainer):
            self._keep(trainer, VALIDATES)

    def after_end(self, trainer: Trainer) -> None:
        """Keep the state after a validation."""
        if self._keeper is not None and not accumulates(trainer):
            self._keep(trainer, _ENDS)

    def after_epoch(self, trainer: Trainer) -> None:
        """Keep the state between two epochs."""
        if self._keeper is not None:
            self._keep(trainer, _BETWEEN)

    def _keep(self, trainer: Trainer, left: str) -> None:
        assert self._keeper is not None
        if left != _BETWEEN:
            self._end_epoch()
        self._kept_at = survivor().place().step
        known = {
            "left": left,
            "loops": _loops(trainer, is_completed=left != _SAVES),
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "reports": self._reports.steps,
            "files": self._reports.files_saved,
            "saved_last": all_saved_last(trainer),
        }
        own = self._own(trainer)
        if own is None:
            return
        self._keeper.at_end_of_step(known, own, is_ahead=True)
        if not self._keeper.keeps:
            self._keeper = None

    def _go_before_checkpoints(self, callbacks: list[Any]) -> None:
        callbacks.remove(self)
        first = next(
            (n for n, each in enumerate(callbacks) if isinstance(each, Checkpoint)), len(callbacks)
        )
        callbacks.insert(first, self)

    def _own(self, trainer: Trainer) -> State | None:
        """Return what this rank has alone; None if a checkpoint can't hold it."""
        assert self._keeper is not None
        try:
            return {"logged": Logged(trainer).kept(), "should_stop": bool(trainer.should_stop)}
        except ValueError as error:
            self._keeper.refuse(str(error))
            return None

    def _around_training_step(self, trainer: Trainer, own: Any) -> Callable[..., Any]:
        def training_step(*args: Any, **options: Any) -> Any:
            output = own(*args, **options)
            if self._keeper is not None:
                self._keeper.after_forward(self._own(trainer))
            return output

        return training_step

    def _around_optimizer_step(self, own: Any) -> Callable[..., Any]:
        def optimizer_step(*args: Any, **options: Any) -> Any:
            if self._keeper is None:
                return own(*args, **options)
            # Lightning computes the gradients within the optimizer's step.
            with self._keeper.noting_steps_itself():
                return own(*args, **options)

        return optimizer_step

    # Called by the survivor's thread

    def _files(self, trainer: Trainer) -> Files:
        def write(directory: Path, whole: State, found: Differences, of_library: Any) -> None:
            parts, known = whole["parts"], of_library
            content = whole_checkpoint(trainer)
            loops = {**content["loops"], "fit_loop": known["loops"]}
            data = trainer.datamodule
            content |= {
                "epoch": known["epoch"],
                "global_step": known["global_step"],
                "loops": loops,
                "state_dict": parts["model"],
                "callbacks": parts[_CALLBACKS],
                "optimizer_states": [parts["optimizer"]],
                "lr_schedulers": [
                    parts[f"scheduler {number}"]
                    for number, _ in enumerate(trainer.lr_scheduler_configs)
                ],
            }
            if data is not None and type(data).__qualname__ in content:
                content[type(data).__qualname__] = parts["data"]
            file = directory / CHECKPOINT_FILE
            if self._reports.loads_anything:
                torch.save(content, file)
            else:
                save_safely(content, file)
            batches = known["loops"]["epoch_loop.batch_progress"]["current"]["ready"]
            self._reports.write_beside(trainer, directory, known["files"], batches=batches)
            write_found(found, directory)
            left = {name: known[name] for name in ("left", "reports", "saved_last")}
            save_safely({**left, "own": whole["own"]}, directory / LEFT_FILE)
            if not self._reports.loads_anything and is_first_save(self):
                read_back(file, trainer)

        return write


class _States:
    """The states of all callbacks, as one part."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {
            each.state_key: state
            for each in self._trainer.callbacks
            if (state := each.state_dict())
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for each in self._trainer.callbacks:
            if each.state_key in states:
                each.load_state_dict(states[each.state_key])


def _parts(trainer: Trainer) -> dict[str, Any]:
    schedulers = {
        f"scheduler {number}": each.scheduler
        for number, each in enumerate(trainer.lr_scheduler_configs)
    }
    data = {} if trainer.datamodule is None else {"data": trainer.datamodule}
    return {
        "model": trainer.lightning_module,
        "optimizer": trainer.optimizers[0],
        **schedulers,
        _CALLBACKS: _States(trainer),
        **data,
    }


def _loops(trainer: Trainer, *, is_completed: bool) -> State:
    """Return the loops' state, in which the batch counts as completed."""
    state: State = trainer.fit_loop.state_dict()
    if not is_completed:
        progress = state["epoch_loop.batch_progress"]
        progress["total"]["completed"] += 1
        progress["current"]["completed"] += 1
    return state
