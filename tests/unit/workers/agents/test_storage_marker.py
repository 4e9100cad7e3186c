"""Whether a node sees the run's storage: an error that passes isn't taken for an answer."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from polytrain.storage.beneath import Beneath
from polytrain.storage.location import Location
from polytrain.workers.agents.part_storer import storage_problem


def failing(*numbers: int) -> Callable[[Beneath, str], os.stat_result]:
    """`Beneath.status` on a file server that fails at first."""
    status, errors = Beneath.status, [OSError(number, "broken") for number in numbers]

    def fails(files: Beneath, path: str) -> os.stat_result:
        if errors:
            raise errors.pop(0)
        return status(files, path)

    return fails


def problem(path: Path, *, retry_s: float) -> str | None:
    location = Location.of(path, retry_s=retry_s)
    return asyncio.run(storage_problem(location, "marker", host="a"))


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
