"""Callbacks that write files: by rank 0 alone, where every rank would write the same."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

_PLACES: dict[type, str] = {
    # Not left out: what they read of a model, all ranks may have to read together.
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}
"""Attributes that say where a callback writes."""


@contextlib.contextmanager
def written_by_rank_0(
    callbacks: Sequence[Any], *, is_alone: bool, rank: int
) -> Iterator[list[Any]]:
    """The callbacks that a rank is to have; what other ranks' write is thrown away.

    Raises:
        ValueError: one would resume from a file, beside the run's checkpoints.
    """
    for each in callbacks:
        if not is_alone and isinstance(each, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "callbacks: BackupAndRestore can't be used on several workers: all would write the "
                "same file, and rows would not go on where it does. Leave it out, for the run's "
                "own checkpoints: ReportCallback() in a training function, or "
                "CheckpointConfig(checkpoint_frequency=1) without one."
            )
    if rank == 0:
        yield list(callbacks)
        return
    with contextlib.ExitStack() as stack:
        for each in callbacks:
            for kind, name in _PLACES.items():
                if isinstance(each, kind):
                    stack.enter_context(_elsewhere(each, name))
        yield [each for each in callbacks if not isinstance(each, keras.callbacks.CSVLogger)]


@contextlib.contextmanager
def _elsewhere(callback: Any, name: str) -> Iterator[None]:
    """While what a callback writes is thrown away."""
    own = getattr(callback, name)
    with tempfile.TemporaryDirectory() as directory:
        # Its last part may say what kind of file it is.
        setattr(callback, name, str(Path(directory, Path(own).name)))
        try:
            yield
        finally:
            setattr(callback, name, own)
