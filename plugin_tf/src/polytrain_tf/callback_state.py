"""The state of Keras's callbacks that watch for progress, in checkpoints beside the model.

Without it, early stopping would count epochs without progress from 0 after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from polytrain_tf.private import EMA_IN_MODEL

_KEPT: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best",),
    # Whether an epoch's checkpoint has the averages where the weights belong.
    keras.callbacks.SwapEMAWeights: (EMA_IN_MODEL,),
}
"""Attributes that hold a number, a list of arrays, or None."""

_FILE = "callbacks.npz"


def save_callbacks(callbacks: Sequence[Any], directory: Path) -> None:
    """Write the state of the callbacks that watch for progress; no file if there are none."""
    arrays: dict[str, Any] = {}
    for key, name, callback in _kept(callbacks):
        value = getattr(callback, name)
        if isinstance(value, list):
            arrays |= {f"{key}/{name}/{number}": array for number, array in enumerate(value)}
        elif value is not None:
            arrays[f"{key}/{name}"] = np.asarray(value)
    if arrays:
        np.savez(directory / _FILE, **arrays)


def load_callbacks(callbacks: Sequence[Any], directory: Path) -> None:
    """Restore the saved state of callbacks with the same class and position.

    Call this after training has begun, because callbacks reset themselves then.
    """
    if not (directory / _FILE).exists():
        return
    with np.load(directory / _FILE) as saved:
        for key, name, callback in _kept(callbacks):
            whole = f"{key}/{name}"
            parts = [part for part in saved.files if part.startswith(f"{whole}/")]
            if parts:
                # In the order of the save.
                setattr(callback, name, [saved[part] for part in parts])
            elif whole in saved.files:
                setattr(callback, name, saved[whole].item())


def _kept(callbacks: Sequence[Any]) -> list[tuple[str, str, Any]]:
    """The attributes to save: the callback's key, the attribute's name, the callback."""
    return [
        (f"{number}-{kind.__name__}", name, callback)
        for number, callback in enumerate(callbacks)
        for kind, names in _KEPT.items()
        if isinstance(callback, kind)
        for name in names
    ]
