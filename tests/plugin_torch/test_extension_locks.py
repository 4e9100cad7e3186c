"""The lock of a C++ extension, whose owner may be killed while it builds."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.file_baton import FileBaton

from polytrain import FailureConfig, RunConfig, ScalingConfig, get_context, make_trainer
from polytrain_torch import extension_locks


@pytest.fixture(autouse=True)
def guarded() -> Iterator[None]:
    with extension_locks.guarded_extension_locks():
        yield


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """The lock of a process that was killed while it built."""
    path = tmp_path / "lock"
    program = (
        "import os, signal, sys\n"
        "from torch.utils.file_baton import FileBaton\n"
        "from polytrain_torch.extension_locks import guarded_extension_locks\n"
        "with guarded_extension_locks():\n"
        "    assert FileBaton(sys.argv[1]).try_acquire()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, path], check=False)
    assert run.returncode == -signal.SIGKILL
    assert path.exists()
    return path


def test_the_lock_of_a_killed_process_is_taken_over_by_one_other(abandoned: Path) -> None:
    first, second = FileBaton(abandoned), FileBaton(abandoned)
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert not abandoned.exists()
    second.wait()
    assert second.try_acquire()
    second.release()


def test_waiting_for_a_killed_process_is_an_error(abandoned: Path) -> None:
    with pytest.raises(RuntimeError, match=r"building the C\+\+ extension .* is gone. Try again"):
        FileBaton(abandoned).wait()
    assert FileBaton(abandoned).try_acquire()


@pytest.mark.parametrize(
    "content", [pytest.param("", id="torch's"), pytest.param("another\n", id="another node's")]
)
def test_a_lock_of_which_nothing_is_known_is_kept_and_named(
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "lock"
    path.write_text(content)
    baton = FileBaton(path)
    assert not baton.try_acquire()
    monkeypatch.setattr(extension_locks, "_WARN_AFTER_S", -1.0)
    naps = []

    def release_at_second(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            path.unlink()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=release_at_second)
    monkeypatch.setattr(extension_locks, "time", clock)
    with caplog.at_level(logging.WARNING):
        baton.wait()
    [record] = caplog.records
    assert str(path) in record.getMessage()
    assert "remove this file" in record.getMessage()


def test_a_restart_builds_what_a_killed_rank_was_building(tmp_path: Path) -> None:
    lock = str(tmp_path / "lock")

    def train() -> str:
        baton = FileBaton(lock)
        if not baton.try_acquire():
            return "waits"
        if get_context().get_attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        baton.release()
        return "built"

    result = make_trainer(
        "torch",
        train,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            storage_path=tmp_path, progress=False, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert result.return_value == "built"
