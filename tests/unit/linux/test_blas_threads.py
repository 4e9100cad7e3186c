"""The threads of OpenBLAS's copies in a process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from polytrain.linux.blas_threads import start_blas_threads


@pytest.mark.parametrize(
    ("name", "is_there"),
    [(b"openblas.bin", True), (b"openblas.bin", False), (b"openblas \xff.bin", True)],
    ids=["no library", "deleted", "a name that is no text"],
)
def test_a_mapped_file_that_cannot_be_loaded_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes, is_there: bool
) -> None:
    """It may be data with such a name, or a library that was installed anew meanwhile."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    file = tmp_path / os.fsdecode(name)
    file.write_bytes(b"rows")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        if not is_there:
            file.unlink()
        start_blas_threads({"OPENBLAS_NUM_THREADS": "2"})
