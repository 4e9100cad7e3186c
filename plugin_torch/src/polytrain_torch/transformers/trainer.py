"""Hugging Face's `Trainer` in a training function, with its checkpoints in the run's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from polytrain import (
    CheckpointConsistencyMode,
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
)
from polytrain.extension import keep_all_batches
from polytrain_torch.checkpoints.parts import part_of, report_part
from polytrain_torch.checkpoints.rank_parts import (
    States,
    comparable,
    found_beside,
    own_beside,
    own_states,
    refuse_other_ranks,
    save_beside,
)
from polytrain_torch.checkpoints.read_back import Load, is_first_save, try_all
from polytrain_torch.checkpoints.safe_serialization import (
    loaded,
    refuse_unsafe_file,
    save_safely,
)
from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.collectives.stopping import agreed, any_rank_stops
from polytrain_torch.models.parallel import models_in_ddp, unwrapped
from polytrain_torch.models.unaveraged import keep_frozen, wraps_in_ddp
from polytrain_torch.private import send_buffers, uncompiled
from polytrain_torch.transformers.adapters import (
    is_adapted,
    load_buffers,
    without_frozen,
    write_buffers,
)
from polytrain_torch.transformers.best_model import restore_best
from polytrain_torch.transformers.epoch_order import EpochOrder
from polytrain_torch.transformers.kept_steps import KeptSteps
from polytrain_torch.transformers.loggers import KeptEvents
from polytrain_torch.transformers.made_by import (
    SUMS,
    calls,
    epoch_of,
    is_resumed_from,
    made_by,
    write_made_by,
)
from polytrain_torch.transformers.private import (
    SECONDS,
    LogSums,
    prepare_anew,
    replace_end_of_step,
)
from polytrain_torch.transformers.shards import take_batches
from polytrain_torch.virtual_workers import refuse_virtual_workers

__all__ = ["RayTrainReportCallback", "ReportCallback", "prepare_trainer"]

_UNFREEZE_BEFORE = (
    "Train in two calls of train(), and unfreeze them between the two; or freeze them in a "
    "callback's on_train_begin, with TrainingArguments(ddp_find_unused_parameters=True)."
)


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Have a trainer report to the run, and resume from its checkpoint.

    The trainer's logs become the run's metrics, and its checkpoints the run's checkpoints, as often
    as its `TrainingArguments` say. After a restart, `trainer.train()` resumes from the newest
    checkpoint, also in the middle of an epoch; without one, `resume_from_checkpoint` applies. If
    there are several calls of `train()`, the one that saved the checkpoint resumes; later ones
    start fresh.

    The trainer's data sets may be a shard's batches: `get_dataset_shard(…).iter_torch_batches(…)`.
    These are batches of this rank; they aren't split or collated again.

    `train()` raises a ValueError if it can't resume from the newest checkpoint: if a later call
    saved it, or if a step has a different number of rows.

    Args:
        trainer: this rank's trainer, before `train()` is called. If it has a `ReportCallback`, that
            one reports; otherwise it gets one.

    Returns:
        The same trainer.

    Raises:
        TypeError: a data set is a shard instead of its batches.
        ValueError: `auto_find_batch_size` with a shard's batches.
    """
    refuse_virtual_workers("Transformers")
    added = (each for each in trainer.callback_handler.callbacks if _reports(each))
    reports = next(added, None)
    if reports is None:
        reports = ReportCallback()
        trainer.add_callback(reports)
    reports._awaits_call = True
    events = KeptEvents()
    events.keep_directory(trainer)
    is_first_call = True
    own_train = trainer.train
    is_resumed = False
    take_batches(trainer, is_resumed=lambda: is_resumed)
    send_before_evaluations(trainer)

    def train(resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        nonlocal is_resumed, is_first_call
        sums.begin()
        keep_all_batches("Transformers finds its place in an epoch by the number of steps")
        files = reports._begin_call(trainer)
        is_resumed = files is not None and made_by(files) is not None
        if files is not None:
            resume_from_checkpoint = str(files)
            if is_resumed:
                _restore_callbacks(trainer, files)
        is_restart = is_first_call and get_context().get_attempt() > 0
        events.are_repeated = files is not None or is_restart
        is_first_call = False
        if reports.is_whole:
            prepare_anew(trainer)
            if trainer.args.ddp_broadcast_buffers is not False:
                # DDP will broadcast this model's buffers: the trainer keeps the unwrapped model.
                models_in_ddp.add(trainer.model)
            keep_frozen(trainer.model, wrapped_by="train()", remedy=_UNFREEZE_BEFORE)
        with _no_second_start(trainer.args, files):
            result = own_train(resume_from_checkpoint, *args, **options)
        agree_on_call("the end of train()")
        return result

    def ending_step(own_end: Any) -> Any:
        def end_step(
            loss: Any, grad_norm: Any, *args: Any, learning_rate: float | None = None
        ) -> None:
            grad_norm, learning_rate = steps.values_of_step(grad_norm, learning_rate)
            if not steps.before_end(loss, grad_norm, *args, learning_rate=learning_rate):
                return
            own_end(loss, grad_norm, *args, learning_rate=learning_rate)
            steps.after_end()
            control = trainer.control
            control.should_training_stop, control.should_epoch_stop = agreed(
                any_rank_stops, control.should_training_stop, control.should_epoch_stop
            )

        return end_step

    reports._sums = sums = LogSums(trainer)
    steps = KeptSteps(
        trainer,
        reports,
        end_step=replace_end_of_step(trainer, ending_step),
        sums=sums,
        write_beside=lambda files: write_made_by(files, reports, trainer.args),
        read_back=_read_back,
    )
    reports._before_report, reports._left = steps.before_report, steps.left
    reports._order = EpochOrder(trainer, is_between_epochs=lambda: steps.is_between_epochs)
    trainer.add_callback(steps)
    trainer.add_callback(reports._order)
    trainer.train = train
    return trainer


def send_before_evaluations(trainer: Trainer) -> None:
    """Have DDP send rank 0's buffers before a trainer evaluates or predicts.

    DDP sends them in training steps only, and Transformers evaluates without DDP: each rank would
    use running means of its own since the last step, which a restart loses.
    """
    own_loop = trainer.evaluation_loop

    def evaluation_loop(*args: Any, **options: Any) -> Any:
        model = uncompiled(trainer.model_wrapped)
        if isinstance(model, DistributedDataParallel):
            send_buffers(model)
        return own_loop(*args, **options)

    trainer.evaluation_loop = evaluation_loop


class ReportCallback(TrainerCallback):
    """Reports a trainer's logs and checkpoints. `prepare_trainer` adds one."""

    CHECKPOINT_NAME = ""
    """Directory of the trainer's files in a checkpoint."""

    def __init__(self) -> None:
        self.call = 1
        """Number of the call of `train()` in this attempt."""

        self.batches_per_epoch: int | None = None
        """Number of a shard's batches per epoch in this call, if known."""

        self.is_whole = False
        """Whether DDP trains the model, so that rank 0 saves all of it."""

        self._awaits_call = False
        """Whether the first call of `prepare_trainer`'s `train()` in this attempt comes later."""

        self.resumes_from: Path | None = None
        """The checkpoint that this call resumes from."""

        self.files: Path | None = None
        """The trainer's files in that checkpoint."""

        self.best: Path | None = None
        """The directory of the best model before that checkpoint."""

        self._left: Callable[[], Mapping[str, Any] | None] = lambda: None
        """Returns what a checkpoint leaves of the end of a step or an epoch, for the next one."""

        self._before_report: Callable[[Mapping[str, Any]], None] = lambda _: None
        """Called with the metrics before a checkpoint is reported."""

        self._sums: LogSums | None = None
        """What the trainer adds up for its logs."""

        self._order: EpochOrder | None = None
        """The random numbers when the current epoch began."""

        self._held: dict[str, Any] = {}
        self._logged: dict[str, Any] = {}
        self._logged_step = -1

    def _begin_call(self, trainer: Trainer) -> Path | None:
        """Note the next call of `train()`; return the files that it resumes from, if any."""
        self.call, self._awaits_call = calls.next(), False
        self.batches_per_epoch = epoch_of(trainer.train_dataset)
        self.is_whole = wraps_in_ddp(trainer.accelerator)
        self.resumes_from = self.files = self.best = None
        checkpoint = get_checkpoint()
        if checkpoint is not None:
            directory = Path(checkpoint.path)
            files = _files_of(directory)
            if is_resumed_from(files, self.call, trainer):
                self.resumes_from, self.files = directory, files
                self.best = restore_best(files, trainer.args, files_in=self.CHECKPOINT_NAME)
        return self.files

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Load this rank's own states, after the trainer has loaded rank 0's."""
        if self.best is not None:
            state.best_model_checkpoint = str(self.best)
        if self.resumes_from is not None and self.files is not None:
            load_buffers(unwrapped(objects["model"]), self.files)
            _restore_own(self.resumes_from, objects)
            self._continue_epoch(self.resumes_from, self.files)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Report metrics, unless the step is saved: `on_save` then reports them."""
        if self._awaits_call and _has_trained():
            # It is an evaluation before the training, reported before that has saved a checkpoint.
            return
        self._held |= logs or {}
        self._logged, self._logged_step = dict(self._held), state.global_step
        if not control.should_save:
            self._report(None)

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Report the checkpoint that has been saved."""
        if self._logged_step == state.global_step:
            # If the trainer saves only the best, it decides after on_log has reported: repeat it.
            self._held = self._logged
        directory = Path(args.output_dir, f"checkpoint-{state.global_step}")
        # Rank 0 has written these files. Other ranks may get here earlier.
        if is_first_save(self) and dist.get_rank() == 0:
            _refuse_unsafe(directory)
            _read_back(directory, **objects)
        sums, left = {} if self._sums is None else self._sums.as_json(), self._left()
        order = {} if self._order is None else self._order.state()
        with part_of(directory, name=self.CHECKPOINT_NAME) as part:
            if part is not None and dist.get_rank() == 0:
                write_made_by(part / self.CHECKPOINT_NAME, self, args, sums=sums, left=left)
                if order:
                    save_safely(order, part / self.CHECKPOINT_NAME / _ORDER_FILE)
                model = unwrapped(objects["model"])
                if self.is_whole and is_adapted(model):
                    write_buffers(model, model.state_dict(), part / self.CHECKPOINT_NAME)
            names = () if not self.is_whole else _PARTS[:1] if args.save_only_model else _PARTS
            _save_own(part, {name: objects.get(name) for name in names}, sums, order)
            self._before_report(self._held)
            self._report(part)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the remaining metrics."""
        if self._held:
            self._report(None)

    def _continue_epoch(self, directory: Path, files: Path) -> None:
        """Continue what a checkpoint has added up for logs, and the order of its epoch."""
        sums, file = (made_by(files) or {}).get(SUMS), files / _ORDER_FILE
        order = loaded(file) if file.exists() else None
        own = own_beside({SUMS: {SUMS: sums}, _ORDER: {_ORDER: order}}, directory)
        if sums and self._sums is not None:
            self._sums.restore(own[SUMS][SUMS])
        if order is not None and self._order is not None:
            self._order.resume(own[_ORDER][_ORDER])

    def _report(self, part: Path | None) -> None:
        metrics, self._held = self._held, {}
        report_part(metrics, part)


class RayTrainReportCallback(ReportCallback):
    """Reports each checkpoint that a trainer saves, with all metrics that it has logged so far.

    It works like Ray Train's callback of this name: the files are in the directory "checkpoint",
    and nothing is reported between two checkpoints. Without `prepare_trainer` a restart doesn't
    resume by itself: pass the checkpoint to `train(resume_from_checkpoint=…)`.
    """

    CHECKPOINT_NAME = "checkpoint"

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Report nothing yet."""

    def on_save(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Report the checkpoint that has been saved."""
        for logged in state.log_history:
            self._held |= logged
        super().on_save(args, state, control, **options)


def _restore_callbacks(trainer: Trainer, files: Path) -> None:
    """Restore what callbacks count, such as evaluations without progress before an early stop.

    Transformers does so only with `restore_callback_states_from_checkpoint`.
    """
    file = files / TRAINER_STATE_NAME
    saved = TrainerState.load_from_json(str(file)).stateful_callbacks if file.exists() else {}
    by_class: dict[str, list[Any]] = {}
    for each in trainer.callback_handler.callbacks:
        if isinstance(each, ExportableState):
            by_class.setdefault(type(each).__name__, []).append(each)
    for name, callbacks in by_class.items():
        states = saved.get(name, [])
        # A single one's state is no list.
        states = states if isinstance(states, list) else [states]
        # To several ones' states Transformers appends those of each further checkpoint.
        for each, state in zip(callbacks, states[-len(callbacks) :], strict=False):
            for attribute, value in state.get("attributes", {}).items():
                setattr(each, attribute, value)


@contextmanager
def _no_second_start(args: Any, resumed: Path | None) -> Iterator[None]:
    """Have a trainer not evaluate before its first step in a block, if a restart resumes it.

    The evaluation would be reported again, and an early stop would count it.
    """
    evaluates = args.eval_on_start
    file = None if resumed is None else resumed / TRAINER_STATE_NAME
    if file is not None and file.exists() and get_context().get_attempt() > 0:
        has_begun = TrainerState.load_from_json(str(file)).global_step > 0
        args.eval_on_start = evaluates and not has_begun
    try:
        yield
    finally:
        args.eval_on_start = evaluates


def _reports(callback: Any) -> bool:
    return isinstance(callback, ReportCallback)


def _files_of(directory: Path) -> Path:
    """Return the directory of the trainer's files in a checkpoint of either callback."""
    apart = directory / RayTrainReportCallback.CHECKPOINT_NAME
    return apart if apart.is_dir() else directory


def _has_trained() -> bool:
    """Whether a checkpoint of this run is from the next call of `train()`, or a later one."""
    checkpoint = get_checkpoint()
    if checkpoint is None or not get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED):
        return False
    then = made_by(_files_of(Path(checkpoint.path)))
    return then is not None and then["call"] >= calls.upcoming()


def _refuse_unsafe(directory: Path) -> None:
    """Refuse files that a restart couldn't load safely."""
    for name in ("optimizer.pt", "scheduler.pt", "scaler.pt"):
        if (directory / name).exists():
            refuse_unsafe_file(directory / name)


def _read_back(
    directory: Path, *, model: Any = None, optimizer: Any = None, lr_scheduler: Any = None, **_: Any
) -> None:
    """Load the files that hold whole states into copies, as a restart would."""
    loads: list[tuple[Any, Load]] = []
    weights = directory / SAFE_WEIGHTS_NAME
    if weights.exists():
        # The file has tied weights only once.
        loads.append(
            (unwrapped(model), lambda copied: copied.load_state_dict(load_file(weights), False))
        )
    elif (directory / WEIGHTS_NAME).exists():
        loads.append((unwrapped(model), partial(_load_file, directory / WEIGHTS_NAME)))
    parts = {"optimizer.pt": optimizer, "scheduler.pt": lr_scheduler}
    for name, part in parts.items():
        if (directory / name).exists():
            # Accelerate wraps optimizers and schedulers.
            own = getattr(part, "optimizer" if part is optimizer else "scheduler", part)
            loads.append((own, partial(_load_file, directory / name)))
    try_all(loads)


def _load_file(file: Path, copied: Any) -> None:
    copied.load_state_dict(loaded(file))


_PARTS = ("model", "optimizer", "lr_scheduler")

_ORDER = "order"
_ORDER_FILE = "order.pt"
"""File with what the order of rank 0's current epoch depends on."""


def _save_own(
    part: Path | None,
    objects: Mapping[str, Any],
    sums: Mapping[str, Any],
    order: Mapping[str, Any],
) -> None:
    """Write states that differ by rank. All ranks call this.

    Args:
        part: this rank's part of the checkpoint; None if it has none.
        objects: the trainer's parts.
        sums: what is added up for logs.
        order: what the order of the current epoch depends on.
    """
    parts = {name: each for name, each in objects.items() if each is not None}
    states: States = {
        "parts": {name: _state(unwrapped(each)) for name, each in parts.items()},
        SUMS: {SUMS: sums},
        _ORDER: {_ORDER: order},
    }
    compared = {name: comparable(parts[name], state) for name, state in states["parts"].items()}
    # Time alone isn't worth a file for each rank: they may all have rank 0's.
    timeless = {name: value for name, value in sums.items() if name != SECONDS}
    save_beside(states, {**states, "parts": compared, SUMS: {SUMS: timeless}}, part)


def _state(part: Any) -> Mapping[str, Any]:
    state: Mapping[str, Any] = part.state_dict()
    return without_frozen(part, state) if is_adapted(part) else state


def _restore_own(directory: Path, objects: Mapping[str, Any]) -> None:
    """Load states that differ by rank into a trainer's objects.

    Raises:
        ValueError: another number of ranks has saved them.
    """
    found = found_beside(directory)
    if found is None:
        return
    refuse_other_ranks(found["names"].get("parts", ()), found)
    for name, state in own_states({"parts": {}}, found, directory)["parts"].items():
        part = unwrapped(objects[name])
        part.load_state_dict(state, **({"strict": False} if is_adapted(part) else {}))
