"""Saves the state of Keras's callbacks that track progress, beside the model in a checkpoint.

Without it, `EarlyStopping` would restart its count of epochs without progress after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from polytrain_tf.private import BATCHES_SINCE_SAVE, EMA_IN_MODEL
from polytrain_tf.saved import storable

_KEPT: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best", BATCHES_SINCE_SAVE),
    # Whether the saved model has the averages in place of the weights.
    keras.callbacks.SwapEMAWeights: (EMA_IN_MODEL,),
}
"""Callback class → attributes to save. Each holds a number, a list of arrays, or None."""

_FILE = "callback-states.npz"


def save_callbacks(callbacks: Sequence[Any], directory: Path) -> None:
    """Write the state of the callbacks that track progress; no file if there is no state."""
    write_states(states_of(callbacks), directory)


def states_of(callbacks: Sequence[Any]) -> dict[tuple[str, str], Any]:
    """Return the state of the callbacks that track progress, by callback and attribute.

    Callbacks replace these values, and don't change them.
    """
    return {(key, name): getattr(callback, name) for key, name, callback in _kept(callbacks)}


def write_states(states: Mapping[tuple[str, str], Any], directory: Path) -> None:
    """Write states that `states_of` has returned; no file if there is no state."""
    arrays: dict[str, Any] = {}
    for (key, name), value in states.items():
        if isinstance(value, list):
            arrays |= {f"{key}/{name}/{number}": storable(one) for number, one in enumerate(value)}
        elif value is not None:
            arrays[f"{key}/{name}"] = storable(value)
    if arrays:
        np.savez(directory / _FILE, **arrays)


def load_callbacks(callbacks: Sequence[Any], directory: Path) -> None:
    """Restore the saved state of callbacks that have the same class, in their order.

    Call this after training has begun: callbacks reset themselves when it begins.
    """
    if not (directory / _FILE).exists():
        return
    with np.load(directory / _FILE) as saved:
        for key, name, callback in _kept(callbacks):
            whole = f"{key}/{name}"
            parts = [part for part in saved.files if part.startswith(f"{whole}/")]
            if parts:
                # `files` keeps the order in which arrays were saved.
                setattr(callback, name, [saved[part] for part in parts])
            elif whole in saved.files:
                setattr(callback, name, saved[whole].item())


def _kept(callbacks: Sequence[Any]) -> list[tuple[str, str, Any]]:
    """Return the attributes to save, as (callback's key, attribute's name, callback).

    Keys don't depend on callbacks of other classes: rank 0 may have some that other ranks lack.
    """
    return [
        (f"{number}-{kind.__name__}", name, callback)
        for kind, names in _KEPT.items()
        for number, callback in enumerate(each for each in callbacks if isinstance(each, kind))
        for name in names
    ]
