"""Has Transformers' TensorBoard callback write to one directory over restarts."""

from __future__ import annotations

import os
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback

from polytrain import get_context
from polytrain.extension import Calls
from polytrain_torch.private import drop_events
from polytrain_torch.transformers.private import write_events

_trainers = Calls("prepare_trainer()")


class KeptEvents(TrainerCallback):
    """Has TensorBoard drop events that a restart repeats, before the callback writes new ones."""

    def __init__(self) -> None:
        self.are_repeated = False
        """Whether the upcoming training repeats steps that an earlier attempt has logged."""

        self._boards: list[TensorBoardCallback] = []

    def keep_directory(self, trainer: Trainer) -> None:
        """Name the directory of event files after the run, unless the user has named one."""
        run, number = get_context().get_experiment_name(), _trainers.next()
        callbacks = trainer.callback_handler.callbacks
        for each in callbacks:
            if isinstance(each, TensorBoardCallback) and each.tb_writer is None:
                name = run if number == 1 else f"{run}-{number}"
                if each.logging_dir is None:
                    each.logging_dir = os.path.join(trainer.args.output_dir, "runs", name)
                self._boards.append(each)
        callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the first repeated step. The saved step's metrics were logged before its save."""
        if not (self.are_repeated and state.is_world_process_zero) or state.is_hyper_param_search:
            return
        first = state.global_step + 1 if state.global_step else 0
        for board in self._boards:
            if board.tb_writer is None:
                write_events(board, args)
            drop_events(board.tb_writer, first)
