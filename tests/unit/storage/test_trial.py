"""A process tries a storage: what it may not do is named, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from polytrain.storage.local import LocalStorage
from polytrain.storage.location import Location, refusal


def test_a_directory_that_can_be_used_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    assert refusal(Location.of(tmp_path)) is None
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("other", "kept")]


@pytest.mark.parametrize(
    ("method", "operation"),
    [("write", "write to"), ("read", "read what it has written to"), ("delete", "delete files in")],
)
def test_the_refused_operation_is_named(
    method: str, operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(LocalStorage, method)
    refused = []

    def once(*arguments: object) -> object:
        if not refused:
            refused.append(method)
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(*arguments)

    monkeypatch.setattr(LocalStorage, method, once)
    found = refusal(Location.of(tmp_path, retry_s=30))
    assert found is not None
    assert found.what == f"can't {operation} {tmp_path} (Permission denied)"
    assert "RunConfig.storage_path" in found.remedy
    assert list(tmp_path.iterdir()) == []
