"""What Keras's callbacks that watch for progress have seen: in checkpoints, beside the model.

Without it, one that stops training after some epochs without progress counts anew after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

_KEPT: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best",),
}
"""Attributes that hold a number, a list of arrays, or None."""

_FILE = "callbacks.npz"


def save_callbacks(callbacks: Sequence[Any], directory: Path) -> None:
    """Write what those callbacks have seen that watch for progress; no file if none does."""
    arrays = {}
    for key, name, callback in _kept(callbacks):
        value = getattr(callback, name)
        if isinstance(value, list):
            arrays |= {f"{key}/{name}/{number}": array for number, array in enumerate(value)}
        elif value is not None:
            arrays[f"{key}/{name}"] = np.asarray(value)
    if arrays:
        np.savez(directory / _FILE, **arrays)


def load_callbacks(callbacks: Sequence[Any], directory: Path) -> None:
    """Give callbacks back what was saved of those of the same class at the same places.

    To be called when training has begun: they forget everything then.
    """
    if not (directory / _FILE).exists():
        return
    with np.load(directory / _FILE) as saved:
        for key, name, callback in _kept(callbacks):
            whole = f"{key}/{name}"
            parts = [part for part in saved.files if part.startswith(f"{whole}/")]
            if parts:
                # In the order in which they were written.
                setattr(callback, name, [saved[part] for part in parts])
            elif whole in saved.files:
                setattr(callback, name, saved[whole].item())


def _kept(callbacks: Sequence[Any]) -> list[tuple[str, str, Any]]:
    """What there is to keep: a callback's name among the others, an attribute's, the callback."""
    return [
        (f"{number}-{kind.__name__}", name, callback)
        for number, callback in enumerate(callbacks)
        for kind, names in _KEPT.items()
        if isinstance(callback, kind)
        for name in names
    ]
