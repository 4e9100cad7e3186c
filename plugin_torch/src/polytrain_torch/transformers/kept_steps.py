"""Keeps a trainer's state at the end of each step, and continues there after a loss of a rank.

A step ends with what the trainer's callbacks have asked for: a log, an evaluation, a checkpoint.
The state is kept before that, with what is still to be done, and again after each report. So a
restart does the rest, and then begins the next step. A checkpoint that the trainer saves says what
is left of an epoch, whose end may come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from polytrain import get_context
from polytrain.extension import survivor
from polytrain_plugins import Batches
from polytrain_torch.checkpoints.rank_parts import (
    Differences,
    own_beside,
    write_found,
)
from polytrain_torch.checkpoints.read_back import is_first_save
from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely
from polytrain_torch.collectives.stopping import agreed, any_rank
from polytrain_torch.models.parallel import prepared_models, unwrapped
from polytrain_torch.randomness import (
    random_state,
    restore_random_state,
    restore_random_states,
)
from polytrain_torch.survivors import keeper
from polytrain_torch.survivors.gpu_copies import key_of
from polytrain_torch.survivors.keeper import Keeper
from polytrain_torch.survivors.kept_by_rank import State
from polytrain_torch.transformers.adapters import is_adapted, write_buffers
from polytrain_torch.transformers.epoch_order import draws_again
from polytrain_torch.transformers.made_by import LEFT, made_by
from polytrain_torch.transformers.private import (
    LogSums,
    replace_loading_random,
    replace_starting_place,
)

if TYPE_CHECKING:
    from polytrain_torch.transformers.trainer import ReportCallback

from accelerate import DistributedType
from safetensors.torch import save_file
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import has_length
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

_FILE = "end-of-step.pt"
"""File in a survivor's checkpoint: what was left of a step, and what rank 0 has of its own."""

_ASKED = ("should_log", "should_evaluate", "should_save")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the trainer knows at a clean point."""

    state: Mapping[str, Any]
    """The fields of its `TrainerState`. Its list of logs may have got longer since."""

    logs: int
    """The number of its logs."""

    end: Mapping[str, Any]
    """Which end of a step or an epoch it is, and what is left of it."""


class KeptSteps(TrainerCallback):
    """Keeps the state of one trainer. It comes after the callback that reports."""

    def __init__(
        self,
        trainer: Trainer,
        reports: ReportCallback,
        *,
        end_step: Callable[..., None],
        sums: LogSums,
        write_beside: Callable[[Path], None],
        read_back: Callable[..., None],
    ) -> None:
        """
        Args:
            reports: the callback that reports its checkpoints.
            end_step: does what a step ends with, with the arguments of the trainer's method.
            sums: what the trainer adds up for its logs.
            write_beside: writes what a checkpoint has beside the trainer's files.
            read_back: loads these files into copies of the trainer's objects.
        """
        self._trainer = trainer
        self._reports = reports
        self._end_step = end_step
        self._write_beside = write_beside
        self._read_back = read_back
        self._parts: dict[str, Any] = {}
        self._keeper: Keeper | None = None
        self._sums = sums
        self._end: State = {}
        """What is known of the current end of a step or an epoch; empty between them."""

        self._is_asked = False
        """Whether callbacks have asked for anything at the current end."""

        self._is_epoch_end = False
        self._resumed = _Resumed()
        self._has_forecast = False
        """Whether the current training step has said what it ends with."""

        self._operations = 0.0
        """Number of floating-point operations of the current batch."""

        self._epoch_began = 0
        """Number of steps when the current epoch began."""

        self._left: State = {}
        """What polytrain's checkpoint had left to do; known once the place is found."""

        self._finds_place = False
        """Whether the call finds its place in an epoch by what an earlier attempt has left."""

        replace_starting_place(trainer, self._place)
        self._load_random = replace_loading_random(trainer, self._loading_random)
        self._own_batches, self._own_step = trainer.get_batch_samples, trainer.training_step
        trainer.get_batch_samples, trainer.training_step = self._batches, self._step
        # A partial: `weigh_backward` takes it for its own, and doesn't wrap it again.
        trainer.accelerator.backward = partial(self._backward, trainer.accelerator.backward)

    # Called by the trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> Any:
        """Do what the checkpoint has left to do, and begin to keep the state."""
        self._keeper, self._resumed = None, _Resumed()
        directory, files = self._reports.resumes_from, self._reports.files
        if directory is not None and files is not None:
            if "own" in self._left:
                self._resume(directory)
            elif self._left:
                self._resume_saved(files)
            if state.global_step >= state.max_steps:
                # The trainer looks at that after a step only, and would take one more.
                self._trainer.control.should_training_stop = self._resumed.stops = True
        self._begin(objects)
        return self._trainer.control

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue an epoch as it was."""
        self._is_epoch_end = False
        began, self._resumed.epoch_began = self._resumed.epoch_began, None
        self._epoch_began = state.global_step if began is None else began
        if self._resumed.is_between_epochs:
            self._resumed.restore_random()
        elif self._resumed.stops_epoch:
            # The trainer has just taken it back, as it does in the next epoch.
            control.should_epoch_stop, self._resumed.stops_epoch = True, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue with the random numbers of the state, now that the batch is fetched."""
        self._resumed.restore_random()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that the next end is an epoch's."""
        self._resumed.restore_random()
        self._is_epoch_end = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the state after the report of a log, unless a checkpoint's report will have it."""
        if self._end and "learning_rate" in (logs or {}) and not control.should_save:
            self._keep()

    # Called by the trainer's end of a step, and by its reports

    def before_end(
        self,
        _sum: Any,
        grad_norm: Any,
        _model: Any,
        _trial: Any,
        epoch: float,
        ignored: Any,
        _start: float | None,
        *,
        learning_rate: float | None,
    ) -> bool:
        """Keep the state; return whether there is anything to end.

        It gets the arguments of the trainer's own method.
        """
        if self._resumed.skips_end:
            self._resumed.skips_end = False
            return False
        trained = self._trainer.state.epoch
        self._end = {
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "epoch": epoch,
            "epoch_began": self._epoch_began,
            "ignored": ignored,
            "is_epoch_end": self._is_epoch_end,
            "is_last_step": trained == int(trained),
        }
        flags = self._flags
        self._is_asked = any(flags[name] for name in _ASKED)
        if self._keeper is not None and not self._is_epoch_end:
            self._keeper.expect_step()
        self._keep()
        return True

    def values_of_step(self, grad_norm: Any, learning_rate: float | None) -> tuple[Any, Any]:
        """Return what an end logs of its last step, also of one before a restart."""
        last = self._resumed.last_step
        return (grad_norm, learning_rate) if last is None or learning_rate is not None else last

    def left(self) -> Mapping[str, Any] | None:
        """Return what a checkpoint leaves of the current end: stops. All ranks call this.

        That the last step is reached is no stop: a run may be resumed with more of them.
        """
        if not self._end:
            return None
        flags, state = self._flags, self._trainer.state
        is_over = state.global_step >= state.max_steps
        training, epoch = agreed(
            any_rank, flags["should_training_stop"] and not is_over, flags["should_epoch_stop"]
        )
        stops = {"should_training_stop": training, "should_epoch_stop": epoch}
        return self._end_with({**dict.fromkeys(flags, False), **stops})

    def before_report(self, metrics: Mapping[str, Any]) -> None:
        """Keep the state with the report of a checkpoint, which is about to be made."""
        if self._end:
            self._keep(reported=metrics)

    def after_end(self) -> None:
        """Keep the state when all that was asked for is done."""
        if self._is_asked:
            self._keep()
        self._end = {}

    def _keep(self, reported: Mapping[str, Any] | None = None) -> None:
        if self._keeper is not None:
            flags = self._flags
            self._keeper.at_end_of_step(
                _Known(
                    state=self._state(),
                    logs=len(self._trainer.state.log_history),
                    end=self._end_with(flags),
                ),
                self._own(),
                reported=reported,
            )

    def _state(self) -> State:
        """Return the fields of the trainer's state, of which only the list of logs grows.

        Copying that in each step would take longer with each log.
        """
        state, callbacks = self._trainer.state, self._trainer.callback_handler.callbacks
        kept = [*callbacks, self._trainer.control]
        of_callbacks = TrainerState(
            stateful_callbacks=[each for each in kept if isinstance(each, ExportableState)]
        ).stateful_callbacks
        known = {each.name: getattr(state, each.name) for each in fields(state)}
        return {**known, "stateful_callbacks": of_callbacks}

    def _end_with(self, flags: Mapping[str, bool]) -> State:
        # Read late: it may be on a GPU, which nobody waits for in each step.
        norm = self._end.get("grad_norm")
        return {**self._end, "grad_norm": None if norm is None else float(norm), "flags": flags}

    def _own(self) -> State:
        return {"sums": self._sums.kept(), "operations": float(self._trainer.current_flos)}

    @property
    def _flags(self) -> dict[str, bool]:
        flags: dict[str, bool] = self._trainer.control.state()["args"]
        return flags

    def _begin(self, objects: Mapping[str, Any]) -> None:
        trainer = self._trainer
        optimizer = getattr(objects["optimizer"], "optimizer", objects["optimizer"])
        why_not = self._unsuitable(optimizer)
        if why_not is not None:
            survivor().keep_nothing(why_not)
            return
        if isinstance(trainer.model_wrapped, DistributedDataParallel):
            prepared_models.add(trainer.model_wrapped)
        self._parts = {
            "model": trainer.model,
            "optimizer": optimizer,
            "lr_scheduler": objects["lr_scheduler"],
        }
        self._keeper = keeper.start(
            Keeper(self._parts, {}, files=self._write, whose="the trainer", by_batch=False)
        )
        self._is_asked = False
        self._keep()
        if not self._keeper.keeps:
            # What is kept would have to be read from a device in each step.
            self._keeper = None

    def _unsuitable(self, optimizer: Any) -> str | None:
        trainer = self._trainer
        if self._reports.call > 1:
            return "it isn't the first call of train()"
        is_alone = trainer.accelerator.distributed_type == DistributedType.NO
        if not (is_alone or self._reports.is_whole):
            return "its model isn't trained with DDP"
        if not isinstance(optimizer, torch.optim.Optimizer):
            return "its optimizer isn't one of torch's"
        if getattr(trainer.accelerator, "scaler", None) is not None:
            return "it scales its gradients"
        loader = trainer.callback_handler.train_dataloader
        if not has_length(loader):
            return "the length of its epochs isn't known"
        if trainer.args.ignore_data_skip or trainer.args.auto_find_batch_size:
            return "it doesn't continue an epoch where it was"
        if not isinstance(trainer.train_dataset, Batches) and not draws_again(loader):
            return "a restart can't draw the rows of its epoch again"
        if trainer.state.is_hyper_param_search:
            return "it searches for hyperparameters"
        return None

    def _step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        self._has_forecast = False
        if self._keeper is not None:
            self._operations = float(self._trainer.floating_point_ops(inputs))
        loss = self._own_step(model, inputs, *args, **options)
        if not self._has_forecast:
            self._forecast(loss)
        return loss

    def _backward(self, own_backward: Any, loss: Any, **options: Any) -> Any:
        # Before the gradients meet those of other ranks.
        self._forecast(loss.detach())
        return own_backward(loss, **options)

    def _forecast(self, loss: torch.Tensor) -> None:
        if self._keeper is not None:
            operations = float(self._trainer.current_flos) + self._operations
            self._keeper.after_forward({"sums": self._sums.kept(loss), "operations": operations})
            self._has_forecast = True

    # Called by the survivor's thread

    def _write(self, directory: Path, whole: State, found: Differences, of_library: Any) -> None:
        files = directory / self._reports.CHECKPOINT_NAME
        files.mkdir(exist_ok=True)
        model, parts = unwrapped(self._trainer.model), whole["parts"]
        if is_adapted(model):
            model.save_pretrained(str(files), state_dict=parts["model"])
            write_buffers(model, parts["model"], files)
        elif isinstance(model, PreTrainedModel):
            # Otherwise it saves itself only on rank 0.
            model.should_save_on_this_rank = lambda is_main_process: True
            model.save_pretrained(str(files), state_dict=dict(parts["model"]))
        else:
            _write_weights(files, parts["model"])
        save_safely(parts["optimizer"], files / "optimizer.pt")
        save_safely(parts["lr_scheduler"], files / "scheduler.pt")
        logs = of_library.state["log_history"][: of_library.logs]
        state = TrainerState(**{**of_library.state, "log_history": logs})
        state.save_to_json(str(files / "trainer_state.json"))
        self._write_beside(files)
        write_found(found, directory)
        save_safely({"end": of_library.end, "own": whole["own"]}, directory / _FILE)
        if is_first_save(self):
            self._read_back(files, **self._parts)

    # After a restart

    def _resume(self, directory: Path) -> None:
        own = own_beside({"own": self._left["own"]}, directory)["own"]
        self._sums.restore(own["sums"])
        self._trainer.current_flos = own["operations"]
        restore_random_states(directory)
        self._end_again(self._left["end"])
        self._continue(self._left["end"], random=random_state())

    def _resume_saved(self, files: Path) -> None:
        end = self._left["end"]
        if self._is_over(end):
            self._load_random(str(files))
        # A run that begins with another one's checkpoint decides for itself.
        if get_context().get_attempt() > 0:
            self._end_again(end)
        self._continue(end, random=random_state() if self._is_over(end) else None)

    def _continue(self, end: Mapping[str, Any], *, random: dict[str, Any] | None) -> None:
        """Note how the training continues after an end, by the flags that it has left."""
        flags, is_over = self._flags, self._is_over(end)
        self._resumed = _Resumed(
            random=random,
            loads_random=random is None,
            epoch_began=None if is_over else end["epoch_began"],
            is_between_epochs=is_over,
            is_after_epoch=end["is_last_step"] or end["is_epoch_end"],
            stops=flags["should_training_stop"] or (flags["should_epoch_stop"] and not is_over),
            stops_epoch=flags["should_epoch_stop"],
            last_step=(end["grad_norm"], end["learning_rate"]),
        )

    def _place(self, own: tuple[int, int]) -> tuple[int, int]:
        """Return the epoch to begin with, and how many batches of it were trained."""
        args, self._left = self._trainer.args, self._read_left()
        # A shard goes by the number of steps, and another run may have other epochs.
        is_shard = isinstance(self._trainer.train_dataset, Batches)
        is_again = get_context().get_attempt() > 0 and not args.ignore_data_skip
        self._finds_place = bool(self._left) and is_again and not is_shard
        if not self._finds_place:
            return own
        end = self._left["end"]
        if self._is_over(end):
            return end["epoch"] + 1, 0
        steps = self._trainer.state.global_step - end["epoch_began"]
        return end["epoch"], steps * args.gradient_accumulation_steps

    def _read_left(self) -> State:
        """Return what the checkpoint that the call resumes from had left; empty if unknown."""
        directory, files = self._reports.resumes_from, self._reports.files
        if directory is None or files is None:
            return {}
        if (directory / _FILE).exists():
            return loaded(directory / _FILE)
        end = (made_by(files) or {}).get(LEFT)
        return {} if end is None else {"end": end}

    def _is_over(self, end: Mapping[str, Any]) -> bool:
        """Whether the training continues in the next epoch: an epoch may have been stopped."""
        is_last, is_end = bool(end["is_last_step"]), bool(end["is_epoch_end"])
        return is_last or (is_end and self._finds_place)

    @property
    def is_between_epochs(self) -> bool:
        """Whether the call resumes before the first step of an epoch."""
        return self._resumed.is_between_epochs

    def _loading_random(self, own_load: Any, checkpoint: str | None) -> None:
        if self._resumed.loads_random:
            own_load(checkpoint)

    def _end_again(self, end: Mapping[str, Any]) -> None:
        """Do what was left of a step, and of the epoch if it was the last one."""
        trainer, self._epoch_began = self._trainer, end["epoch_began"]
        for name, is_set in end["flags"].items():
            setattr(trainer.control, name, is_set)

        def end_step() -> None:
            self._end_step(
                self._sums.loss,
                end["grad_norm"],
                trainer.model_wrapped,
                None,
                end["epoch"],
                end["ignored"],
                None,
                learning_rate=end["learning_rate"],
            )

        self._is_epoch_end = end["is_epoch_end"]
        end_step()
        if end["is_last_step"] and not end["is_epoch_end"]:
            trainer.control = trainer.callback_handler.on_epoch_end(
                trainer.args, trainer.state, trainer.control
            )
            end_step()

    def _batches(self, *args: Any, **options: Any) -> Any:
        resumed = self._resumed
        if not resumed.stops:
            return self._own_batches(*args, **options)
        # The trainer looks for a stop only after a step, which the training has stopped before.
        resumed.stops, resumed.skips_end = False, resumed.is_after_epoch
        return [], None


def _write_weights(files: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a model that isn't Transformers', where the trainer reads it."""
    if len({*map(key_of, weights.values())}) < len(weights):
        # They are tied: safetensors can't hold a tensor by two names.
        save_safely(weights, files / WEIGHTS_NAME)
    else:
        whole = {name: each.contiguous() for name, each in weights.items()}
        save_file(whole, files / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


@dataclass(slots=True, kw_only=True)
class _Resumed:
    """How the first step after a restart begins."""

    random: dict[str, Any] | None = None
    """The random states to begin it with, if they aren't those in the trainer's files."""

    loads_random: bool = True
    """Whether the trainer loads the random states in its files."""

    epoch_began: int | None = None
    """Number of steps when its epoch began; None if it is the first of its epoch."""

    is_between_epochs: bool = False
    """Whether it is the first of its epoch."""

    is_after_epoch: bool = False
    """Whether the end of an epoch is done."""

    last_step: tuple[Any, Any] | None = None
    """The norm of gradients and the learning rate of the step before it."""

    stops: bool = False
    """Whether there is no such step: the training, or its epoch, has been stopped."""

    stops_epoch: bool = False
    skips_end: bool = False
    """Whether the next end of an epoch is that of an epoch without a step."""

    def restore_random(self) -> None:
        """Restore the random states, once."""
        if self.random is not None:
            restore_random_state(self.random)
            self.random = None
