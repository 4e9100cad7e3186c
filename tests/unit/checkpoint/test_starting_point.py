"""What an attempt resumes from is brought to its node, and is what it was said to be."""

from __future__ import annotations

import errno
import hashlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import fsspec
import pytest
from tests.unit.checkpoint.checkpoints import manifest

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.manifest import MANIFEST_NAME, StoredFile
from polytrain.checkpoint.starting_point import StartingPoint, brought_near, starting_point
from polytrain.errors import CheckpointError
from polytrain.storage.location import Location

HOSTILE = ("../escaped", "inner/../../escaped", "../../../../escaped", "..", "./model", "nul\0")
"""Names that lead, or could lead, out of the directory that they are joined to."""


def far_away(run: str, content: bytes) -> Location:
    """A directory of files that isn't on this machine's disk."""
    location = Location.of(f"memory://{run}/checkpoints/checkpoint_000003-1.0", retry_s=0)
    location.open().write("model", content)
    return location


def hostile_bucket(name: str) -> Location:
    """A bucket with an object of this name: keys of objects may be any text."""
    location = far_away("hostile", b"theirs")
    objects = fsspec.filesystem("memory").store
    objects[f"{location.address.removeprefix('memory:/')}/{name}"] = next(iter(objects.values()))
    return location


@pytest.fixture(autouse=True)
def no_objects() -> None:
    """Memory of the process: what other tests have written is still there."""
    fsspec.filesystem("memory").store.clear()


def test_two_checkpoints_of_one_name_are_two(tmp_path: Path) -> None:
    """A run is begun with another one's checkpoint, and later resumes from its own."""
    for run, content in (("theirs", b"their model"), ("ours", b"our model"), ("theirs", b"?")):
        start = brought_near(starting_point(far_away(run, content)), tmp_path)
        assert start.path is not None
        assert Path(start.path, "model").read_bytes() == content


def test_a_copy_that_the_last_attempt_has_changed_is_fetched_again(tmp_path: Path) -> None:
    start = starting_point(far_away("theirs", b"model"))
    near = Path(str(brought_near(start, tmp_path).path))
    (near / "cache").touch()
    fetched = (near / "model").stat()
    assert brought_near(start, tmp_path).path == str(near)
    assert (near / "model").stat() == fetched, "it is as it was"
    for change in (lambda file: file.write_bytes(b"of others"), Path.unlink):
        change(near / "model")
        assert brought_near(start, tmp_path).path == str(near)
        assert (near / "model").read_bytes() == b"model"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_with_no_room_for_a_checkpoint_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """That of the node: there is no limit to what is far away."""

    def write(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    location = replace(far_away("theirs", b"model"), retry_s=600)
    start, health = starting_point(location), location.health
    monkeypatch.setattr("polytrain.storage.remote.copied", write)
    monkeypatch.setattr("polytrain.storage.calls._sleep", no_wait)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # As a storage that has worked for a while, whose access would be waited for.
    health._worked_at = -math.inf
    where = f"{os.strerror(number)}: '{tmp_path}"
    with pytest.raises(OSError, match=f"{where}/restored/.*/model'"):
        brought_near(start, tmp_path)
    assert not health.has_failed
    with (
        pytest.raises(CheckpointError, match=f"{where}/polytrain-checkpoint-.*/model'"),
        Checkpoint(location.address).as_directory(),
    ):
        pass


def no_wait(*_: object) -> NoReturn:
    raise AssertionError("the storage is called again for a fault of this machine's disk")


def test_what_is_near_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"here")
    for start in (starting_point(Location.of(tmp_path)), StartingPoint()):
        assert brought_near(start, tmp_path / "scratch") == start


def test_a_checkpoint_far_away_is_a_directory_for_a_while(tmp_path: Path) -> None:
    location = far_away("shown", b"weights")
    checkpoint = Checkpoint(location.address)
    with checkpoint.as_directory() as directory:
        assert Path(directory, "model").read_bytes() == b"weights"
    assert not Path(directory).exists()
    assert Path(checkpoint.to_directory(tmp_path / "kept"), "model").read_bytes() == b"weights"
    fsspec.filesystem("memory").rm("/shown", recursive=True)
    with pytest.raises(CheckpointError, match="there are no files"), checkpoint.as_directory():
        pass


@pytest.mark.parametrize("name", HOSTILE)
def test_a_listed_name_that_leads_out_of_the_directory_is_refused(
    name: str, tmp_path: Path
) -> None:
    start = starting_point(hostile_bucket(name))
    with pytest.raises(CheckpointError, match="isn't used as a path"):
        brought_near(start, tmp_path / "a" / "b")
    with (
        pytest.raises(CheckpointError, match="isn't used as a path"),
        Checkpoint(str(start.path)).as_directory(),
    ):
        pass
    assert not [path for path in tmp_path.rglob("escaped*") if path.is_file()]


@pytest.mark.parametrize("name", [*HOSTILE, "/escaped", ""])
def test_a_manifest_with_a_name_that_leads_out_of_the_directory_is_refused(
    name: str, tmp_path: Path
) -> None:
    location = hostile_bucket(name)
    digest = hashlib.sha256(b"theirs").hexdigest()
    file = StoredFile(name=name, size=6, sha256=digest, rank=0)
    location.open().write(MANIFEST_NAME, manifest(3, [file]).to_json().encode())
    with pytest.raises(ValueError, match="isn't used as a path"):
        brought_near(starting_point(location), tmp_path / "a" / "b")
    with (
        pytest.raises(CheckpointError, match="isn't used as a path"),
        Checkpoint(location.address).as_directory(),
    ):
        pass
    assert not [path for path in tmp_path.rglob("escaped*") if path.is_file()]
