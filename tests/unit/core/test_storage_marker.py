"""Whether a node sees the run's storage: an error that passes isn't taken for an answer."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from polytrain.storage.location import Location
from polytrain.workers.storage_marker import storage_problem


class Failing:
    """`Path.stat` of a file server that fails at first."""

    def __init__(self, *numbers: int) -> None:
        self._stat, self._errors = Path.stat, [OSError(number, "broken") for number in numbers]

    def __get__(self, path: Path, _: type[Path]) -> Failing:
        self._path = path
        return self

    def __call__(self, *, follow_symlinks: bool = True) -> object:
        if self._path.name == "marker" and self._errors:
            raise self._errors.pop(0)
        return self._stat(self._path, follow_symlinks=follow_symlinks)


def problem(path: Path, *, retry_s: float) -> str | None:
    location = Location.of(path, retry_s=retry_s)
    return asyncio.run(storage_problem(location, "marker", host="a"))


def test_a_passing_error_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marker").touch()
    monkeypatch.setattr(Path, "stat", Failing(errno.EIO, errno.ESTALE))
    assert problem(tmp_path, retry_s=30) is None


@pytest.mark.parametrize(("number", "retry_s"), [(errno.EIO, 0.0), (errno.EACCES, 30.0)])
def test_an_error_that_lasts_is_told(
    number: int, retry_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "stat", Failing(*[number] * 50))
    told = problem(tmp_path, retry_s=retry_s)
    assert told is not None
    assert told.startswith(f"the node a can't read the run's directory {tmp_path}: ")
    assert "broken" in told
