"""Lets only rank 0's callbacks write files or send messages."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

_PLACES: dict[type, str] = {
    # They run on all ranks, because reading a model may be a collective operation.
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}
"""Callback class → the attribute with its output path."""


_OF_RANK_0 = (keras.callbacks.CSVLogger, keras.callbacks.RemoteMonitor)
"""Callbacks that only rank 0 needs."""

# Keras before 3.15 has no OrbaxCheckpoint.
_REFUSED = tuple(
    getattr(keras.callbacks, name)
    for name in ("BackupAndRestore", "OrbaxCheckpoint")
    if hasattr(keras.callbacks, name)
)


@contextlib.contextmanager
def written_by_rank_0(
    callbacks: Sequence[Any], *, is_alone: bool, rank: int
) -> Iterator[list[Any]]:
    """Yield the callbacks to use on a rank. Files of ranks other than 0 are discarded.

    Raises:
        ValueError: a callback writes its own checkpoints beside the run's.
    """
    for each in callbacks:
        if not is_alone and isinstance(each, _REFUSED):
            raise ValueError(
                f"callbacks: {type(each).__name__} doesn't work on several workers: all would "
                "write the same files, without the place in the data. Use the run's checkpoints: "
                "ReportCallback() in a training function, or "
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
        yield [each for each in callbacks if not isinstance(each, _OF_RANK_0)]


@contextlib.contextmanager
def _elsewhere(callback: Any, name: str) -> Iterator[None]:
    """Let a callback write into a temporary directory, and discard the files."""
    own = getattr(callback, name)
    with tempfile.TemporaryDirectory() as directory:
        # Keep the file's name: its suffix may set the format.
        setattr(callback, name, str(Path(directory, Path(own).name)))
        try:
            yield
        finally:
            setattr(callback, name, own)
