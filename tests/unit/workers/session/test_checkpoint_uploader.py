"""A disk that takes no files: the error says which, and what to do, if it stays so."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.staging import Stagings
from polytrain.config.configs import RunConfig
from polytrain.errors import CheckpointError
from polytrain.workers.session.checkpoint_files import CheckpointFiles
from polytrain.workers.session.checkpoint_uploader import CheckpointUploader


def submit(
    scratch: Path,
    number: int,
    *,
    timeout_s: float = 0,
    has_room: Event | None = None,
    directory: Path | None = None,
) -> list[Any]:
    """Stage a checkpoint, whose files can't be written for this reason, until there is room.

    Args:
        directory: where the files lie; None if an engine writes them.

    Returns:
        What is sent to the agent.
    """
    config = RunConfig(storage_timeout_s=timeout_s)
    job: Any = SimpleNamespace(near_staging=None, spec=SimpleNamespace(run_config=config))
    order: Any = SimpleNamespace(attempt_id=AttemptId(token=1, attempt=0), first_checkpoint=0)
    sent: list[Any] = []
    channel: Any = SimpleNamespace(
        send=lambda *messages: sent.extend(messages), receive=lambda: ["settled", 0]
    )
    uploader = CheckpointUploader(job=job, order=order, rank=0, channel=channel, scratch=scratch)

    def write(directory: Path) -> Mapping[str, Any]:
        Path(directory, "half").write_text("a half")
        if has_room is None or not has_room.is_set():
            raise OSError(number, os.strerror(number))
        return {}

    uploader.submit(
        CheckpointFiles(write=write, directory=directory),
        step=1,
        metrics={},
        positions={},
        report=list,
        waits=True,
    )
    return sent


class WhenLogged(logging.Handler):
    """Sets an event at the first record."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self._event = event

    def emit(self, record: logging.LogRecord) -> None:
        self._event.set()


@pytest.mark.parametrize(
    ("number", "lie_in_a_directory"),
    [(errno.ENOSPC, False), (errno.EDQUOT, True), (errno.ESTALE, True), (errno.EIO, True)],
)
def test_a_disk_that_takes_files_again_in_time_costs_nothing(
    tmp_path: Path, number: int, lie_in_a_directory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    has_room, calls = Event(), logging.getLogger("polytrain.storage.calls")
    handler = WhenLogged(has_room)
    calls.addHandler(handler)
    try:
        sent = submit(
            tmp_path,
            number,
            timeout_s=600,
            has_room=has_room,
            directory=tmp_path if lie_in_a_directory else None,
        )
    finally:
        calls.removeHandler(handler)
    [staged] = [message for message in sent if message[0] == "staged"]
    assert str(tmp_path) in str(staged)
    [file] = tmp_path.rglob("half")
    assert file.read_text() == "a half"
    [message] = caplog.messages
    assert message.startswith("checkpoint_000000-1.0: ")
    assert "Trying again for up to 600 s." in message
    if number in (errno.ENOSPC, errno.EDQUOT):
        assert f"'{tmp_path}'. Trying again for up to 600 s. Make room there" in message


@pytest.mark.parametrize(
    ("number", "message", "remedy"),
    [
        (errno.ENOSPC, "No room for a checkpoint in {} (No space left", "Make room there"),
        (errno.EDQUOT, "No room for a checkpoint in {} (Disk quota", "Make room there"),
        (errno.EROFS, "No checkpoint can be written to {} (Read-only", "Mount it anew"),
    ],
)
def test_a_full_or_read_only_disk_is_named(
    tmp_path: Path, number: int, message: str, remedy: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        submit(tmp_path, number)
    assert str(caught.value).startswith(message.format(tmp_path))
    assert remedy in str(caught.value)
    if number != errno.EROFS:
        # There is room again.
        assert list(tmp_path.rglob("half")) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.ECONNRESET])
def test_other_errors_are_the_systems_own(tmp_path: Path, number: int) -> None:
    """Such as that of a rank with which an engine writes its files together."""
    with pytest.raises(OSError, match=os.strerror(number)):
        submit(tmp_path, number, timeout_s=600)


def test_a_directory_that_can_not_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/shared/run/staging")

    monkeypatch.setattr(Stagings, "new", refused)
    with pytest.raises(CheckpointError, match=r"written to /shared/run/staging \(Read-only"):
        submit(tmp_path, errno.EACCES)
