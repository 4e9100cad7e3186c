"""A model that a full disk doesn't take: room is waited for only if the error says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from polytrain_torch import Torch
from polytrain_torch.checkpoints.state_files import MODEL_FILE
from polytrain_torch.engine import TorchEngine


def save(size: int, directory: Path) -> None:
    TorchEngine(Torch()).save(torch.nn.Linear(1, size), directory)


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_full_disk_is_the_systems_error(tmp_path: Path, size: int) -> None:
    """Torch's own has no number."""
    (tmp_path / MODEL_FILE).symlink_to("/dev/full")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        save(size, tmp_path)
    assert caught.value.errno == errno.ENOSPC


def test_a_disk_that_has_room_again_when_the_file_is_closed_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        save(1, tmp_path)


def test_other_errors_of_torch_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> NoReturn:
        raise RuntimeError("no such tensor")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(RuntimeError, match="no such tensor"):
        save(1, tmp_path)
