"""Storage that a run can't be kept in is told before anything starts, and is left as it was."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from tests.addresses import SECRET, WITH_A_SECRET
from tests.faulty_storage import ERROR, Faults, FaultyFileSystem, FromThenOn
from tests.object_storage import Bucket

from polytrain import InvalidJobError, RunConfig, ScalingConfig, Trainer, make_trainer, report
from polytrain.storage.location import Location, refusal

INLINE = ScalingConfig(num_workers=0)
DATA = {"x0": [0.0, 1.0], "label": [0.0, 1.0]}


@pytest.mark.parametrize("address", WITH_A_SECRET)
def test_a_secret_in_the_address_is_refused_and_not_repeated(problems: Any, address: str) -> None:
    with pytest.raises(InvalidJobError) as caught:
        make_trainer("reference", run_config=RunConfig(storage_path=address))
    assert SECRET not in f"{caught.value} {caught.value!r}"
    found = problems(run_config=RunConfig(storage_path=address))
    problem = found.only("RunConfig.storage_path")
    assert "password" in problem.what
    assert "environment" in problem.remedy
    assert SECRET not in f"{problem} {problem!r}"


def test_a_secret_in_what_a_run_starts_from_is_refused_and_not_repeated(problems: Any) -> None:
    found = problems(restore_from=f"s3://me:{SECRET}@bucket/runs/one/checkpoints/c")
    problem = found.only("restore_from")
    assert "password" in problem.what
    assert SECRET not in f"{problem} {problem!r}"


@pytest.mark.parametrize(
    "given",
    [
        {"storage_path": "memory://checking/runs"},
        {"storage_path": "runs", "storage_filesystem": fsspec.filesystem("memory")},
        {
            "storage_path": "runs",
            "storage_filesystem": DirFileSystem("/deep", fsspec.filesystem("memory")),
        },
    ],
    ids=["address", "file system", "file system in another"],
)
def test_memory_is_out_of_the_workers_reach(problems: Any, given: dict[str, Any]) -> None:
    config = RunConfig(**given)
    found = problems(run_config=config, scaling_config=ScalingConfig(num_workers=2))
    problem = found.only("RunConfig.storage_path")
    assert "memory of this process" in problem.what
    assert "num_workers=0" in problem.remedy
    make_trainer(
        "reference",
        label="label",
        datasets={"train": DATA},
        scaling_config=INLINE,
        run_config=config,
    )


@pytest.mark.parametrize("address", ["s3://missing/runs", "s3://missing"])
def test_a_bucket_that_is_not_there_is_named(problems: Any, bucket: Bucket, address: str) -> None:
    found = problems(run_config=RunConfig(storage_path=address))
    assert address in found.only("RunConfig.storage_path").what


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("AWS_ACCESS_KEY_ID", "Access Key Id"), ("AWS_SECRET_ACCESS_KEY", "signature")],
)
def test_wrong_credentials_are_reported_and_can_be_corrected(
    problems: Any, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, wrong: str, message: str
) -> None:
    """In a notebook, say."""
    config = RunConfig(storage_path="s3://bucket/runs", progress=False)
    with bucket.server.asking_for_credentials() as right:
        for name, value in {**right, wrong: f"wrong-{SECRET}"}.items():
            monkeypatch.setenv(name, value)
        problem = problems(run_config=config).only("RunConfig.storage_path")
        assert "s3://bucket/runs" in problem.what
        assert message in problem.what
        assert "credentials" in problem.remedy
        for secret in (SECRET, right["AWS_SECRET_ACCESS_KEY"]):
            assert secret not in f"{problem} {problem!r}"
        monkeypatch.setenv(wrong, right[wrong])
        result = make_trainer(
            "reference",
            rounds=1,
            label="label",
            datasets={"train": DATA},
            scaling_config=INLINE,
            run_config=config,
        ).fit()
        assert result.checkpoint is not None


def test_a_directory_that_is_no_run_is_left_alone(problems: Any, tmp_path: Path) -> None:
    thesis = tmp_path / "mine" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    found = problems(run_config=RunConfig(storage_path=tmp_path, name="mine"))
    problem = found.only("RunConfig.name")
    assert str(tmp_path / "mine") in problem.what
    assert thesis.read_text() == "years of work"


def test_an_empty_directory_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    make_trainer(
        "reference",
        label="label",
        datasets={"train": DATA},
        run_config=RunConfig(storage_path=tmp_path, name="mine"),
    )


def test_a_file_in_the_place_of_the_runs_is_named(problems: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    found = problems(run_config=RunConfig(storage_path=tmp_path / "runs"))
    problem = found.only("RunConfig.storage_path")
    assert str(tmp_path / "runs") in problem.what


def test_a_full_disk_is_named_before_anything_starts(
    problems: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be waited for."""
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: io.FileIO("/dev/full", "w"))
    problem = problems(run_config=RunConfig(storage_path=tmp_path)).only("RunConfig.storage_path")
    assert problem.what == f"{str(tmp_path)!r} can't be written to (No space left on device)"
    assert "Make room there" in problem.remedy


def test_a_finished_run_gives_its_result_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(
        "reference",
        lambda: report({"loss": 1.0}),
        scaling_config=INLINE,
        run_config=RunConfig(storage_path=tmp_path, name="mine", progress=False),
    )
    trainer.fit()
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: io.FileIO("/dev/full", "w"))
    assert trainer.fit().metrics["loss"] == 1.0


@pytest.mark.parametrize(
    ("filesystem", "path"),
    [
        (5, "runs"),
        ("s3", "runs"),
        ({"protocol": "s3"}, "runs"),
        (pafs.LocalFileSystem, "/runs"),
        (FaultyFileSystem, "runs"),
        (pafs.LocalFileSystem(), "s3://bucket/runs"),
        (pafs.LocalFileSystem(), "file:///runs"),
    ],
    # An object's text has its address: each process would have names of its own for the tests.
    ids=["number", "name", "options", "class", "faulty class", "uri of S3", "uri of files"],
)
def test_what_is_no_file_system_is_refused(problems: Any, filesystem: Any, path: str) -> None:
    config = RunConfig(storage_filesystem=filesystem, storage_path=path)
    problem = problems(run_config=config).only("RunConfig.storage_filesystem")
    assert path in problem.what
    assert "pyarrow.fs.FileSystem" in problem.remedy


def test_a_file_system_without_a_path_is_refused(problems: Any, tmp_path: Path) -> None:
    """The user's home, which is meant by default, is of this machine."""
    config = RunConfig(storage_filesystem=FaultyFileSystem(tmp_path))
    problems(run_config=config).only("RunConfig.storage_filesystem")
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_is_out_is_reported_with_its_own_words(
    problems: Any, tmp_path: Path
) -> None:
    filesystem = FaultyFileSystem(tmp_path, Faults(FromThenOn(0)))
    config = RunConfig(storage_filesystem=filesystem, storage_path="runs")
    problem = problems(run_config=config).only("RunConfig.storage_path")
    assert "'runs' can't be written to" in problem.what
    assert ERROR in problem.what


def test_looking_leaves_nothing_behind(bucket: Bucket, tmp_path: Path, problems: Any) -> None:
    places: list[dict[str, Any]] = [
        {"storage_path": tmp_path / "directory"},
        {"storage_path": "s3://bucket/runs"},
        {"storage_path": "runs", "storage_filesystem": FaultyFileSystem(tmp_path)},
    ]
    for place in places:
        config = RunConfig(name="one", **place)
        make_trainer("reference", label="label", datasets={"train": DATA}, run_config=config)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not (tmp_path / "directory").exists()
    objects = bucket.client.list_objects_v2(Bucket="bucket").get("Contents", [])
    # Arrow marks the directory of what it has deleted.
    assert [found["Key"] for found in objects if not found["Key"].endswith("/")] == []


def inline_run(path: str) -> Trainer:
    return make_trainer(
        "reference",
        label="label",
        datasets={"train": DATA},
        scaling_config=INLINE,
        run_config=RunConfig(storage_path=path, progress=False),
    )


def test_a_bucket_that_is_not_there_is_reported(problems: Any, bucket: Bucket) -> None:
    found = problems.of(lambda: inline_run("s3://another-bucket/runs").fit())
    assert "'s3://another-bucket/runs' can't be written to" in (
        found.only("RunConfig.storage_path").what
    )


def test_trying_out_a_bucket_leaves_no_file_in_it(bucket: Bucket) -> None:
    inline_run(f"s3://{bucket.name}/runs")
    found = bucket.client.list_objects_v2(Bucket=bucket.name).get("Contents", ())
    # Arrow marks directories by empty objects.
    assert [entry["Key"] for entry in found if not entry["Key"].endswith("/")] == []


def test_keys_that_only_another_process_has(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location.of("s3://bucket/runs/run", retry_s=30)
    with bucket.server.asking_for_credentials() as theirs:
        found = refusal(location)
        assert found is not None
        assert found.what.startswith("can't write to s3://bucket/runs/run (")
        assert 'ray.init(runtime_env={"env_vars": ' in found.remedy
        for name, value in theirs.items():
            monkeypatch.setenv(name, value)
        assert refusal(location) is None
    left = bucket.client.list_objects_v2(Bucket="bucket").get("Contents", [])
    # After each deletion Arrow makes an empty object in place of the directory.
    assert [each["Key"] for each in left if not each["Key"].endswith("/")] == []
