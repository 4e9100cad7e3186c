"""Where storages are: addresses and paths, and what must never be shown of them."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from hypothesis import given
from hypothesis import strategies as st
from tests.addresses import SECRET, WITH_A_SECRET

import polytrain
from polytrain import Checkpoint, CheckpointError, Result
from polytrain.data.read.files import is_arrow_dataset
from polytrain.storage.location import Location, is_of_one_process, storage_problems
from polytrain.storage.remote import arrow_filesystem
from polytrain.text.secret_names import holds_credentials, without_credentials


@pytest.mark.parametrize(
    "use",
    [
        Result.from_path,
        polytrain.load,
        Location.of,
        Checkpoint("runs/one").to_directory,
        Result(path="runs/one").report,
        lambda path: Checkpoint(path).get_metadata(),
    ],
)
def test_a_path_that_no_file_can_have_is_refused_with_the_remedy(
    use: Callable[[str], Any],
) -> None:
    with pytest.raises((ValueError, CheckpointError)) as raised:
        use("a\0b")
    assert "The path 'a\\x00b' holds a NUL character" in str(raised.value)
    assert "Give a path or an address without it" in str(raised.value)


@pytest.mark.parametrize("address", ["s3://bucket/./runs", "s3://bucket/a/../runs"])
def test_an_address_leads_straight_to_its_place(address: str) -> None:
    with pytest.raises(ValueError, match=r"has '\.' or '\.\.' as a part"):
        Location.of(address)


@pytest.mark.parametrize(
    "given",
    ["runs/one", "./runs/../runs/one", "runs/one/"],
)
def test_a_path_means_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    location = Location.of(given)
    location.open().write("file", b"here")
    monkeypatch.chdir("/")
    elsewhere = pickle.loads(pickle.dumps(location))
    assert elsewhere.open().read("file") == b"here"
    assert (tmp_path / "runs" / "one" / "file").read_bytes() == b"here"


def test_the_users_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Location.of("~/runs").address == str(tmp_path / "runs")


def test_a_file_address_is_a_directory(tmp_path: Path) -> None:
    for address in (f"file://{tmp_path}/my runs", (tmp_path / "my runs").as_uri()):
        location = Location.of(address)
        assert location.is_local
        location.open().write("file", address.encode())
        assert (tmp_path / "my runs" / "file").read_bytes() == address.encode()


@pytest.mark.parametrize("address", ["s3://", "s3:///", "memory://"])
def test_an_address_without_a_bucket_is_no_directory_of_this_machine(address: str) -> None:
    location = Location.of(address).below("run")
    [problem] = storage_problems(location, num_workers=0)
    assert f"the path is empty: {location.parent.address!r}" in problem.what


@pytest.mark.parametrize(
    ("address", "below", "name", "parent"),
    [
        ("/data/runs", "/data/runs/a", "runs", "/data"),
        ("/data", "/data/a", "data", "/"),
        ("s3://bucket/runs", "s3://bucket/runs/a", "runs", "s3://bucket"),
        ("s3://bucket/runs/", "s3://bucket/runs/a", "runs", "s3://bucket"),
        (
            "s3://bucket/runs?region=eu-north-1&scheme=http",
            "s3://bucket/runs/a?region=eu-north-1&scheme=http",
            "runs",
            "s3://bucket?region=eu-north-1&scheme=http",
        ),
        ("s3://bucket/why?/runs", "s3://bucket/why?/runs/a", "runs", "s3://bucket/why?"),
    ],
)
def test_locations_lie_in_one_another(address: str, below: str, name: str, parent: str) -> None:
    location = Location.of(address)
    assert location.below("a").address == below
    assert location.below("a").name == "a"
    assert location.name == name
    assert location.parent.address == parent


@given(
    st.sampled_from(["/", "/data", "s3://bucket", "s3://bucket?region=x", "memory://runs/b"]),
    st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1),
)
def test_what_lies_in_a_location_has_it_as_its_parent(address: str, name: str) -> None:
    location = Location.of(address)
    # Options of an address can't be in a name.
    inner = location.below(name.replace("=", "_"))
    assert inner.parent == location
    assert inner.name == name.replace("=", "_")


def test_what_lies_in_a_location_has_its_file_system_and_patience() -> None:
    filesystem = fsspec.filesystem("memory")
    inner = Location.of("runs", filesystem, retry_s=5).below("a")
    assert inner.filesystem is filesystem
    assert inner.retry_s == inner.parent.retry_s == 5
    assert not inner.is_local


def test_a_file_system_is_never_shown() -> None:
    filesystem = pafs.S3FileSystem(access_key="me", secret_key=SECRET, region="us-east-1")
    location = Location.of("bucket/runs", filesystem)
    for shown in (repr(location), str(location), repr(Checkpoint("bucket/runs/c", filesystem))):
        assert SECRET not in shown
        assert "S3FileSystem" not in shown


def test_an_address_that_nobody_knows_is_named() -> None:
    with pytest.raises(OSError, match=r"'nowhere://bucket/runs'"):
        Location.of("nowhere://bucket/runs").open()


WITHOUT_A_SECRET = [
    "/data/me:you@home/runs",
    "s3://bucket/runs/me:you@home",
    "s3://bucket/runs?region=eu-north-1&endpoint_override=localhost:9000",
    "s3://me@bucket/runs",
    "sftp://me@host:22/runs",
    "abfs://container@account.dfs.core.windows.net/runs?tenant_id=x",
    "s3://bucket/secret=1/key=2",
]


@pytest.mark.parametrize("address", WITH_A_SECRET)
def test_a_secret_in_an_address_is_recognised_and_hidden(address: str) -> None:
    assert holds_credentials(address)
    shown = without_credentials(address)
    assert SECRET not in shown
    assert shown.partition("://")[0] == address.partition("://")[0]


@pytest.mark.parametrize("address", WITHOUT_A_SECRET)
def test_an_address_without_a_secret_is_shown_as_it_is(address: str) -> None:
    assert not holds_credentials(address)
    assert without_credentials(address) == address


@pytest.mark.parametrize("address", WITH_A_SECRET)
def test_a_secret_is_in_no_message(address: str, tmp_path: Path) -> None:
    asked: list[Any] = [
        Location.of(address).open,
        lambda: Result.from_path(address),
        lambda: Checkpoint(address).to_directory(tmp_path / "copy"),
        lambda: Checkpoint(address).verify(),
    ]
    for ask in asked:
        with pytest.raises((OSError, CheckpointError), match=r"password|secret") as caught:
            ask()
        error: BaseException | None = caught.value
        while error is not None:
            assert SECRET not in f"{error} {error!r}"
            error = error.__cause__ or error.__context__


def test_memory_is_of_one_process() -> None:
    memory = fsspec.filesystem("memory")
    assert is_of_one_process("memory://runs", None)
    assert is_of_one_process("runs", memory)
    assert is_of_one_process("runs", pafs.PyFileSystem(pafs.FSSpecHandler(memory)))
    assert is_of_one_process("runs", DirFileSystem("/deep", memory))
    assert not is_of_one_process("s3://bucket/runs", None)
    assert not is_of_one_process("/data/runs", None)
    assert not is_of_one_process("runs", pafs.LocalFileSystem())
    assert not is_of_one_process("runs", fsspec.filesystem("file"))
    assert not is_of_one_process("runs", DirFileSystem("/deep", fsspec.filesystem("file")))
    assert not is_of_one_process("runs", object())


def test_another_thread_may_be_importing_a_file_systems_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("fsspec", "pyarrow.dataset"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert arrow_filesystem(object()) is None
    assert not is_arrow_dataset(object())
