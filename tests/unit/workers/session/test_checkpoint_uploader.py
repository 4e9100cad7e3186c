"""A disk that takes no files: the error says which, and what to do, if it stays so."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.staging import Stagings
from polytrain.config.configs import RunConfig
from polytrain.errors import CheckpointError
from polytrain.linux import progress_page
from polytrain.linux.progress_page import WorkerStage
from polytrain.storage.location import Location
from polytrain.workers.agents.calls import DrainAttempt, message_of
from polytrain.workers.session.checkpoint_files import CheckpointFiles, _fetch
from polytrain.workers.session.checkpoint_uploader import CheckpointUploader


class Disk:
    """Takes no files for this reason, until some time has passed."""

    def __init__(self, number: int, *, until: float = math.inf) -> None:
        self._number, self._until = number, until
        self.now = 0.0
        self.tries = 0
        self.stages: list[int] = []
        """The rank's stage at each try."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def write(self, directory: Path) -> Mapping[str, Any]:
        self.tries += 1
        self.stages.append(progress_page._page[progress_page._STAGE])
        Path(directory, "half").write_text("a half")
        if self.now < self._until:
            # As when a file is copied.
            raise OSError(self._number, os.strerror(self._number), "source", None, "target")
        return {}


@pytest.fixture(autouse=True)
def fresh_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_page, "_page", memoryview(bytearray(progress_page.SIZE)).cast("Q"))


def submit(
    scratch: Path,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    *,
    timeout_s: float = 0,
    directory: Path | None = None,
    poll: Callable[[], list[Any] | None] = lambda: None,
) -> list[Any]:
    """Stage a checkpoint.

    Args:
        directory: where the files lie; None if an engine writes them.
        poll: returns the agent's next message.

    Returns:
        What is sent to the agent.
    """
    config = RunConfig(storage_timeout_s=timeout_s)
    job: Any = SimpleNamespace(near_staging=None, spec=SimpleNamespace(run_config=config))
    order: Any = SimpleNamespace(attempt_id=AttemptId(token=1, attempt=0), first_checkpoint=0)
    sent: list[Any] = []
    channel: Any = SimpleNamespace(
        send=lambda *messages: sent.extend(messages), receive=lambda: ["settled", 0], poll=poll
    )
    uploader = CheckpointUploader(job=job, order=order, rank=0, channel=channel, scratch=scratch)
    with monkeypatch.context() as patch:
        patch.setattr("polytrain.storage.calls.time", disk)
        uploader.submit(
            CheckpointFiles(write=disk.write, directory=directory),
            step=1,
            metrics={},
            positions={},
            report=list,
            waits=True,
        )
    return sent


@pytest.mark.parametrize(
    ("number", "lie_in_a_directory"),
    [(errno.ENOSPC, False), (errno.EDQUOT, True), (errno.ESTALE, True), (errno.EIO, True)],
)
def test_a_disk_that_takes_files_again_in_time_costs_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    lie_in_a_directory: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, directory = Disk(number, until=60), tmp_path if lie_in_a_directory else None
    sent = submit(tmp_path, disk, monkeypatch, timeout_s=600, directory=directory)
    [staged] = [message for message in sent if message[0] == "staged"]
    assert str(tmp_path) in str(staged)
    [file] = tmp_path.rglob("half")
    assert file.read_text() == "a half"
    [message] = caplog.messages
    assert message.startswith("checkpoint_000000-1.0: ")
    assert "Trying again for up to 600 s." in message
    first, *others = disk.stages
    assert first != WorkerStage.WAITING_FOR_COMMIT, "a first try that hangs would be no hang"
    assert set(others) == {WorkerStage.WAITING_FOR_COMMIT}
    if number in (errno.ENOSPC, errno.EDQUOT):
        assert f"device: '{tmp_path}'. Trying" in message or f"exceeded: '{tmp_path}'" in message
        assert message.endswith("Make room there meanwhile.")
        assert disk.tries < 10, "each would fill the disk again"


@pytest.mark.parametrize("number", [errno.ENXIO, errno.ELOOP, errno.EMFILE])
def test_what_does_not_pass_in_a_reported_directory_is_said_at_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket in it, a loop of links, or a process that leaks descriptors."""
    disk = Disk(number)
    with pytest.raises(OSError, match=os.strerror(number)):
        submit(tmp_path, disk, monkeypatch, timeout_s=600, directory=tmp_path)
    assert disk.tries == 1


def test_a_disk_that_stays_full_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(errno.ENOSPC)
    with pytest.raises(CheckpointError, match=r"No space left on device\), also after a wait\."):
        submit(tmp_path, disk, monkeypatch, timeout_s=600)
    assert 500 < disk.now <= 600
    assert disk.tries < 30


def test_a_checkpoint_from_elsewhere_is_waited_for_once_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its storage works, and has no part in the wait for room on the node."""
    place = Location.of("memory://elsewhere")
    place.open().write("model", b"weights")

    class Fetched(Disk):
        def write(self, directory: Path) -> Mapping[str, Any]:
            return _fetch(place, directory)

        def copied(self, *_: object) -> str:
            self.tries += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = Fetched(errno.ENOSPC)
    monkeypatch.setattr("polytrain.storage.remote.copied", disk.copied)
    with pytest.raises(CheckpointError, match="also after a wait"):
        submit(tmp_path, disk, monkeypatch, timeout_s=600)
    assert 500 < disk.now <= 600
    assert disk.tries < 30
    assert len(caplog.messages) == 1
    assert not place.health.has_failed


def test_a_signal_ends_the_wait_and_another_drain_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits ten minutes for the end of a program; a full disk ends no run that moves."""
    messages = [(10.0, DrainAttempt(attempt=0)), (100.0, DrainAttempt(attempt=0, ends_run=True))]

    def poll() -> list[Any] | None:
        return message_of(messages.pop(0)[1]) if messages and disk.now >= messages[0][0] else None

    disk = Disk(errno.ENOSPC)
    with pytest.raises(
        CheckpointError, match=r"device\), after a wait that a signal has shortened\."
    ):
        submit(tmp_path, disk, monkeypatch, timeout_s=600, poll=poll)
    assert 100 <= disk.now < 106


def test_without_patience_a_checkpoint_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(errno.ENOSPC)
    with pytest.raises(CheckpointError):
        submit(tmp_path, disk, monkeypatch)
    assert disk.tries == 1


@pytest.mark.parametrize(
    ("number", "message", "remedy"),
    [
        (errno.ENOSPC, "No room for a checkpoint in {} (No space left", "Make room there"),
        (errno.EDQUOT, "No room for a checkpoint in {} (Disk quota", "Make room there"),
        (errno.EROFS, "No checkpoint can be written to {} (Read-only", "Mount it anew"),
    ],
)
def test_a_full_or_read_only_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str, remedy: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        submit(tmp_path, Disk(number), monkeypatch)
    assert str(caught.value).startswith(message.format(tmp_path))
    assert remedy in str(caught.value)
    if number != errno.EROFS:
        # There is room again.
        assert list(tmp_path.rglob("half")) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.ECONNRESET])
def test_other_errors_are_the_systems_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Such as that of a rank with which an engine writes its files together."""
    with pytest.raises(OSError, match=os.strerror(number)):
        submit(tmp_path, Disk(number), monkeypatch, timeout_s=600)


def test_a_directory_that_can_not_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/shared/run/staging")

    monkeypatch.setattr(Stagings, "new", refused)
    with pytest.raises(CheckpointError, match=r"written to /shared/run/staging \(Read-only"):
        submit(tmp_path, Disk(errno.EACCES), monkeypatch)
