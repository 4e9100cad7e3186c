"""Has the `ModelCheckpoint`s that are due together save before the first one's file is reported.

A callback's state is in the files of those that save after it, so only the last file has them all.
Its `last_model_path` is in that file itself, so the callback saves it before the report, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytrain_torch.libraries import needed

with needed("lightning"):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from polytrain_torch.lightning.private import (
        count_as_saved,
        current_hook,
        save_last_model,
        saved_last,
        set_saved_last,
    )

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "on_train_batch_end": (None, None, 0),
    "on_validation_end": (),
    "on_train_epoch_end": (),
}
"""The hooks in which callbacks save, with arguments that these don't use."""


def save_others(trainer: Any, saved: Path) -> None:
    """Have those save that come after the callback which has just saved a file, if they are due.

    They skip their own call, as they would in any step that they have saved. Callbacks with hooks
    of their own are left out: two calls may be too many for them.
    """
    hook, callbacks = current_hook(trainer), model_checkpoints(trainer)
    by_path = {Path(path): each for each in callbacks for path in _paths(each)}
    saver = by_path.get(saved)
    if hook not in _ARGUMENTS or saver is None:
        return
    count_as_saved(saver, trainer.global_step, str(saved), hook)
    if saver.save_last and str(saved) != saver.last_model_path:
        save_last_model(saver, trainer)
    for each in callbacks[callbacks.index(saver) + 1 :]:
        if getattr(type(each), hook) is getattr(ModelCheckpoint, hook):
            getattr(each, hook)(trainer, trainer.lightning_module, *_ARGUMENTS[hook])


def all_saved_last(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return what each callback knows of its last save, which its state lacks."""
    return {each.state_key: saved_last(each) for each in model_checkpoints(trainer)}


def set_all_saved_last(trainer: Any, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore what `all_saved_last` has returned. All ranks call this."""
    for each in model_checkpoints(trainer):
        if each.state_key in saved:
            set_saved_last(each, trainer, saved[each.state_key])


def model_checkpoints(trainer: Any) -> list[ModelCheckpoint]:
    """Return the callbacks of a trainer that save its checkpoints."""
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]


def _paths(callback: ModelCheckpoint) -> list[str]:
    paths = (callback.last_model_path, callback.best_model_path, *callback.best_k_models)
    return [path for path in paths if path]
