"""Whether a node can use the run's storage: it sees the driver's file, and writes its own."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.workers.agents.agent_specs import agent_spec

from polytrain.policy.placement import NodeAddress
from polytrain.storage.beneath import Beneath
from polytrain.storage.local import LocalStorage
from polytrain.storage.location import Location
from polytrain.workers.agents import node_checks
from polytrain.workers.agents.agent_host import AgentHost, AgentReady, Mail
from polytrain.workers.agents.node_checks import storage_problem


def failing(*numbers: int) -> Callable[[Beneath, str], os.stat_result]:
    """`Beneath.status` on a file server that fails at first."""
    status, errors = Beneath.status, [OSError(number, "broken") for number in numbers]

    def fails(files: Beneath, path: str) -> os.stat_result:
        if errors:
            raise errors.pop(0)
        return status(files, path)

    return fails


def problem(path: Path, *, retry_s: float) -> str | None:
    return storage_problem(Location.of(path, retry_s=retry_s), "marker", "a")


def test_a_passing_error_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marker").touch()
    monkeypatch.setattr(Beneath, "status", failing(errno.EIO, errno.ESTALE))
    assert problem(tmp_path, retry_s=30) is None


@pytest.mark.parametrize(("number", "retry_s"), [(errno.EIO, 0.0), (errno.EACCES, 30.0)])
def test_an_error_that_lasts_is_reported(
    number: int, retry_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Beneath, "status", failing(*[number] * 50))
    found = problem(tmp_path, retry_s=retry_s)
    assert found is not None
    assert found.startswith(f"the node a can't read the run's directory {tmp_path}: ")
    assert "broken" in found


def test_a_node_whose_storage_is_full_is_named_before_the_time_to_start_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marker").touch()
    tried: list[float] = []
    monkeypatch.setattr(node_checks, "refusal", lambda location: tried.append(location.retry_s))
    assert problem(tmp_path, retry_s=600) is None
    assert tried == [30.0]


def read_only(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_directory_that_is_read_only_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marker").touch()
    monkeypatch.setattr(LocalStorage, "write", read_only)
    found = problem(tmp_path, retry_s=30)
    assert found is not None
    assert found.startswith(f"the node a can't write to {tmp_path} (Read-only file system). Mount")
    assert "RunConfig.storage_path" in found


def arrivals(directory: Path, monkeypatch: pytest.MonkeyPatch, **host: bool) -> list[str | None]:
    """What three agents of a host say of their node: two that start together, and a later one."""
    monkeypatch.setattr("polytrain.workers.agents.agent.ZygoteClient", NoZygote)
    monkeypatch.setenv("TMPDIR", str(directory))
    spec = agent_spec(directory)

    async def run() -> list[str | None]:
        arrived: asyncio.Queue[tuple[int, Mail]] = asyncio.Queue()
        here = NodeAddress(node_id="node", host="a")
        agents = AgentHost(spec, b"job", here, {}, tell=lambda *m: arrived.put_nowait(m), **host)
        found = []
        for numbers in ((0, 1), (2,)):
            agents.start(numbers)
            for _ in numbers:
                _, ready = await arrived.get()
                assert isinstance(ready, AgentReady)
                found.append(ready.place.unusable)
        await agents.end_all()
        return found

    return asyncio.run(asyncio.wait_for(run(), 30))


class NoZygote:
    """Forks nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def connect(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_agents_that_start_together_try_the_storage_once_and_a_later_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = [], LocalStorage.write

    def noting(storage: LocalStorage, path: str, data: bytes) -> None:
        written.append(path)
        if len(written) > 1:
            read_only()
        write(storage, path, data)

    monkeypatch.setattr(LocalStorage, "write", noting)
    first, second, later = arrivals(tmp_path, monkeypatch)
    assert (first, second) == (None, None)
    assert later is not None
    assert "Read-only file system" in later
    assert len(written) == 2
    assert {file.name for file in tmp_path.iterdir() if file.is_file()} == {"marker"}


def test_the_drivers_own_process_tries_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "write", read_only)
    assert arrivals(tmp_path, monkeypatch, is_driver=True) == [None] * 3
