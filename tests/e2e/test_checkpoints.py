"""Checkpoints of a run on workers: who writes them, who waits, which parts make one."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    FailureKind,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.testing.processes import eventually

LARGE = 4_000_000
"""Bytes of a file that is linked rather than copied."""


def fit(quiet: RunConfig, function: Any, config: Mapping[str, Any], **checkpoints: Any) -> Result:
    return make_trainer(
        "reference",
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(
            quiet, name="run", checkpoint_config=CheckpointConfig(**checkpoints)
        ),
    ).fit()


def report_parts(config: Mapping[str, Any]) -> None:
    """Every rank writes a part of its own, as often as the config says for it."""
    rank = polytrain.get_context().get_world_rank()
    for step in range(config["reports"][rank]):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"part-{rank}").write_text(f"{rank} {step}")
            Path(directory, "shared").write_text(config.get("shared", str(rank)))
            if not config.get("shared"):
                Path(directory, "shared").unlink()
            polytrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))
    while rank in config.get("linger", ()):
        time.sleep(0.1)


def test_every_ranks_part_is_in_one_directory(quiet: RunConfig) -> None:
    config = {"reports": [3, 3], "shared": "the same"}
    result = fit(quiet, report_parts, config, written_by="every_rank", num_to_keep=2)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        assert Path(directory, "part-0").read_text() == "0 2"
        assert Path(directory, "part-1").read_text() == "1 2"
        assert Path(directory, "shared").read_text() == "the same"
        reported = json.loads(Path(directory, "polytrain-manifest.json").read_text())["manifest"]
    assert reported["written_by"] == "every_rank"
    assert {file["name"]: file["rank"] for file in reported["files"]} == {
        "part-0": 0,
        "part-1": 1,
        "shared": 0,
    }
    assert len(list(Path(result.path, "checkpoints").iterdir())) == 2


def test_what_a_frozen_writer_stores_late_is_removed_by_the_next_commit(quiet: RunConfig) -> None:
    def thaw(config: Mapping[str, Any]) -> None:
        is_rank_0 = polytrain.get_context().get_world_rank() == 0
        # As if the first attempt's writer had been stopped, and went on only now.
        late = Path(config["run"], "checkpoints", "checkpoint_000007-1.0", "late")
        if is_rank_0 and polytrain.get_context().get_attempt() == 1:
            late.parent.mkdir()
            late.write_text("of no use")
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "model").write_text("new")
            polytrain.report({}, checkpoint=Checkpoint.from_directory(directory))
        if is_rank_0:
            if polytrain.get_context().get_attempt() == 0:
                raise RuntimeError("once")
            assert eventually(lambda: not late.parent.exists())

    assert quiet.storage_path is not None
    result = make_trainer(
        "reference",
        thaw,
        train_loop_config={"run": str(Path(quiet.storage_path, "run"))},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(
            quiet, name="run", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert result.restarts == 1


def test_parts_that_contradict_each_other_end_the_run(quiet: RunConfig) -> None:
    def report(config: Mapping[str, Any]) -> None:
        rank = polytrain.get_context().get_world_rank()
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "model").write_text(f"of rank {rank}")
            polytrain.report({}, checkpoint=Checkpoint.from_directory(directory))

    with pytest.raises(TrainingFailedError, match="Ranks 0 and 1 both wrote 'model'") as raised:
        fit(quiet, report, {}, written_by="every_rank")
    assert raised.value.failures[0].kind is FailureKind.CHECKPOINT_MISMATCH
    assert raised.value.result is not None
    assert raised.value.result.checkpoint is None


def report_shards(config: Mapping[str, Any]) -> None:
    """All ranks report a file, with the name and text that the config says for each."""
    rank = polytrain.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, config["names"][rank]).write_text(config["texts"][rank])
        polytrain.report({}, checkpoint=Checkpoint.from_directory(directory))


def test_files_of_all_ranks_are_merged_and_each_rank_resumes_from_its_own(
    quiet: RunConfig,
) -> None:
    def train(config: Mapping[str, Any]) -> None:
        rank = polytrain.get_context().get_world_rank()
        begun, checkpoint = 0, polytrain.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                begun = int(Path(directory, f"shard-{rank}").read_text())
        for step in range(begun + 1, 5):
            # Files of a rank that is two checkpoints behind come too late.
            polytrain.collective.barrier()
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, f"shard-{rank}").write_text(str(step))
                Path(directory, "model").write_text(f"after {step}")
                polytrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))
            if step == 2 and rank == 1 and checkpoint is None:
                # Committed by then, with the parts of both.
                assert polytrain.get_checkpoint() is not None
                os.kill(os.getpid(), signal.SIGKILL)

    result = make_trainer(
        "reference",
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(
            quiet, name="run", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert (result.restarts, [metrics["step"] for metrics in result.history]) == (1, [1, 2, 3, 4])
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        files = {path.name: path.read_text() for path in Path(directory).iterdir()}
    manifest = json.loads(files.pop("polytrain-manifest.json"))["manifest"]
    assert files == {"shard-0": "4", "shard-1": "4", "model": "after 4"}
    assert {file["name"]: file["rank"] for file in manifest["files"]} == {
        "model": 0,
        "shard-0": 0,
        "shard-1": 1,
    }


def test_of_two_contents_of_one_name_rank_0s_is_kept_and_a_warning_says_so_once(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def report_twice(config: Mapping[str, Any]) -> None:
        for _ in range(2):
            report_shards(config)

    result = fit(quiet, report_twice, {"names": ["model", "model"], "texts": ["of 0", "of 1"]})
    assert len(result.history) == 2
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "model").read_text() == "of 0"
    [warning] = [each.getMessage() for each in caplog.records if each.name.startswith("polytrain")]
    assert "Ranks 0 and 1 reported 'model' in one checkpoint, with different content" in warning
    assert "report it on rank 0 only" in warning
    assert "the rank in it" in warning


def test_rank_0s_files_alone_are_kept_if_asked_for(quiet: RunConfig) -> None:
    config = {"names": ["shard-0", "shard-1"], "texts": ["of 0", "of 1"]}
    result = fit(quiet, report_shards, config, written_by="rank_0")
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "shard-0").is_file()
    assert not Path(result.checkpoint.path, "shard-1").exists()


def test_a_rank_that_ends_without_its_report_is_named(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError) as raised:
        fit(quiet, report_parts, {"reports": [3, 2]}, written_by="every_rank")
    message = raised.value.failures[0].message
    assert "rank 1 has reported 2 of them, and rank 0 3; rank 1 has ended" in message
    # What all have reported counts.
    assert raised.value.result is not None
    assert raised.value.result.checkpoint is not None
    assert Path(raised.value.result.checkpoint.path, "part-1").read_text() == "1 1"


@pytest.mark.parametrize(
    ("options", "reports"),
    [({"max_in_flight": 2}, 3), ({"max_in_flight": 1}, 2), ({"upload": "sync"}, 2)],
    ids=["goes on", "waits with its next", "waits"],
)
def test_a_rank_that_stays_behind_is_named_in_time(
    quiet: RunConfig, options: Mapping[str, Any], reports: int
) -> None:
    """Whatever the other one does, which its peer may be waiting for in turn."""
    config = {"reports": [1, 4], "linger": [0]}
    with pytest.raises(TrainingFailedError) as raised:
        fit(quiet, report_parts, config, written_by="every_rank", report_timeout_s=1, **options)
    message = raised.value.failures[0].message
    assert f"rank 0 has reported 1 of them, and rank 1 {reports};" in message
    assert "rank 0 has reported none for 1 s" in message


def test_a_synchronous_report_returns_when_the_checkpoint_is_committed(quiet: RunConfig) -> None:
    def train(config: Mapping[str, Any]) -> None:
        rank = polytrain.get_context().get_world_rank()
        for step in range(3):
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "model").write_bytes(bytes([step]) * config["bytes"])
                checkpoint = Checkpoint.from_directory(directory)
                polytrain.report({"step": step}, checkpoint=checkpoint, upload="sync")
            manifests = list(Path(config["run"]).glob("checkpoints/*/polytrain-manifest.json"))
            assert rank or len(manifests) == step + 1

    config = {"run": str(Path(str(quiet.storage_path), "run")), "bytes": LARGE}
    result = fit(quiet, train, config)
    assert len(result.best_checkpoints) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_get_checkpoint_after_a_report_returns_what_was_reported(
    quiet: RunConfig, workers: int
) -> None:
    """Committed by then: it can be read, and outlives the caller's own files."""

    def train() -> None:
        assert polytrain.get_checkpoint() is None
        rank = polytrain.get_context().get_world_rank()
        for step in range(4):
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "step").write_text(str(step))
                made = Checkpoint.from_directory(directory)
                polytrain.report({}, checkpoint=None if rank else made)
            newest = polytrain.get_checkpoint()
            if rank:
                assert newest is None
                continue
            assert newest is not None
            newest.verify()
            with newest.as_directory() as found:
                assert Path(found, "step").read_text() == str(step)

    result = make_trainer(
        "reference", train, scaling_config=ScalingConfig(num_workers=workers), run_config=quiet
    ).fit()
    assert len(result.history) == 4


def test_get_checkpoint_says_so_where_a_rank_s_own_is_not_kept(quiet: RunConfig) -> None:
    def train(config: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "model").write_text("the same everywhere")
            polytrain.report({}, checkpoint=Checkpoint.from_directory(directory))
        polytrain.get_checkpoint()

    with pytest.raises(TrainingFailedError, match="can't return what rank 1 has reported"):
        fit(quiet, train, {}, written_by="rank_0")


def test_the_callers_directory_is_its_own(quiet: RunConfig) -> None:
    def train(config: Mapping[str, Any]) -> None:
        directory = Path(config["directory"])
        if polytrain.get_context().get_world_rank():
            return
        for step in range(4):
            # In place, as a user does that has one directory for all checkpoints.
            with (directory / "model").open("wb") as file:
                file.write(bytes([step]) * config["bytes"])
            polytrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))
            assert (directory / "model").stat().st_size == config["bytes"]

    own = Path(str(quiet.storage_path), "own")
    own.mkdir()
    (own / "tokenizer").write_text("written once")
    result = fit(quiet, train, {"directory": str(own), "bytes": LARGE})
    assert (own / "tokenizer").read_text() == "written once"
    # Whatever is written over before it is stored is no checkpoint; all others are whole.
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "model").read_bytes() == b"\3" * LARGE
    for checkpoint, metrics in result.best_checkpoints:
        checkpoint.verify()
        assert Path(checkpoint.path, "model").read_bytes() == bytes([metrics["step"]]) * LARGE
        assert Path(checkpoint.path, "tokenizer").read_text() == "written once"
    # Nor does what becomes of the caller's files later reach those that are committed.
    (own / "model").write_bytes(b"x" * LARGE)
    result.checkpoint.verify()


def test_what_is_not_a_checkpoint_is_refused_at_the_report(quiet: RunConfig) -> None:
    def train(config: Mapping[str, Any]) -> None:
        gone = Checkpoint.from_directory(tempfile.mkdtemp())
        os.rmdir(gone.path)
        anothers = type("Checkpoint", (), {"__module__": "ray.train"})()
        polytrain.report({}, checkpoint=gone if config["gone"] else anothers)

    with pytest.raises(TrainingFailedError, match="Report it before it is deleted"):
        fit(quiet, train, {"gone": True})
    with pytest.raises(
        TrainingFailedError, match=r"polytrain\.Checkpoint, not a ray\.train\.Checkpoint"
    ):
        fit(dataclasses.replace(quiet, storage_path=f"{quiet.storage_path}/2"), train, {"gone": 0})
