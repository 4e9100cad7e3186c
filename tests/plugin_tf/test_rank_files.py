"""Callbacks that write files, on ranks that shall not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from polytrain_tf.rank_files import written_by_rank_0


def writers(directory: Path) -> list[Any]:
    return [
        keras.callbacks.ModelCheckpoint(directory / "{epoch}" / "a.keras"),
        keras.callbacks.ModelCheckpoint(directory / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(directory / "log.csv"),
        keras.callbacks.TerminateOnNaN(),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_writes(tmp_path: Path, rank: int) -> None:
    callbacks = writers(tmp_path)
    own = callbacks[0].filepath
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    with written_by_rank_0(callbacks, is_alone=False, rank=rank) as ours:
        model.fit(np.ones((4, 1)), np.ones(4), verbose=0, callbacks=ours)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == ({"1", "1.weights.h5", "log.csv"} if rank == 0 else set())
    assert callbacks[0].filepath == own


def test_a_board_is_rank_0s(tmp_path: Path) -> None:
    board = keras.callbacks.TensorBoard(tmp_path)
    for rank in (0, 1):
        with written_by_rank_0([board], is_alone=False, rank=rank) as [ours]:
            assert (ours.log_dir == str(tmp_path)) == (rank == 0)
    assert board.log_dir == str(tmp_path)


def test_messages_are_rank_0s() -> None:
    monitor = keras.callbacks.RemoteMonitor()
    for rank, sends in ((0, [monitor]), (1, [])):
        with written_by_rank_0([monitor], is_alone=False, rank=rank) as ours:
            assert ours == sends


def test_a_backup_beside_the_checkpoints_is_refused(tmp_path: Path) -> None:
    backup = [keras.callbacks.BackupAndRestore(tmp_path / "backup")]
    with (
        pytest.raises(ValueError, match=r"BackupAndRestore.*checkpoint_frequency=1"),
        written_by_rank_0(backup, is_alone=False, rank=0),
    ):
        pass
    with written_by_rank_0(backup, is_alone=True, rank=0) as ours:
        assert ours == backup
