"""What a report does with a checkpoint's files, by Ray Train's arguments."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

import polytrain as train
from polytrain import CheckpointUploadMode


def fit(
    function: Callable[..., Any],
    path: Path,
    *,
    workers: int = 0,
    backend: Any = None,
    filesystem: Any = None,
    stop: Any = None,
    **checkpoint: Any,
) -> train.Result:
    return train.DataParallelTrainer(
        function,
        backend_config=backend,
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name="run",
            storage_path="runs" if filesystem else path,
            storage_filesystem=filesystem,
            progress=False,
            stop=stop,
            checkpoint_config=train.CheckpointConfig(**checkpoint),
        ),
    ).fit()


def made(text: str = "weights") -> Path:
    directory = Path(tempfile.mkdtemp())
    (directory / "model").write_text(text)
    return directory


MODES: list[tuple[dict[str, Any], bool, bool]] = [
    ({}, True, False),
    ({"checkpoint_upload_mode": CheckpointUploadMode.SYNC}, True, True),
    ({"checkpoint_upload_mode": CheckpointUploadMode.ASYNC}, False, False),
    (
        {"checkpoint_upload_mode": "ASYNC", "delete_local_checkpoint_after_upload": False},
        True,
        False,
    ),
    ({"delete_local_checkpoint_after_upload": True, "upload": "sync"}, False, True),
]


@pytest.mark.parametrize(("options", "stays", "waits"), MODES, ids=repr)
@pytest.mark.parametrize("workers", [0, 2])
def test_how_files_are_uploaded(
    tmp_path: Path, options: dict[str, Any], stays: bool, waits: bool, workers: int
) -> None:
    def function() -> tuple[bool, bool]:
        directory = made()
        train.report({}, train.Checkpoint(str(directory)), None, **options)
        storage = train.get_context().get_storage()
        manifests = Path(storage.experiment_fs_path, "checkpoints").glob(
            "*/polytrain-manifest.json"
        )
        return directory.exists(), any(manifests)

    result = fit(function, tmp_path, workers=workers)
    exists, is_committed = result.return_value
    assert exists is stays
    assert is_committed or not waits
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "model").read_text() == "weights"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_report_that_ends_a_run_deletes_its_directory_too(tmp_path: Path, workers: int) -> None:
    """It doesn't return."""
    kept = tmp_path / "directory"

    def function() -> None:
        directory = made()
        kept.write_text(str(directory))
        train.report(
            {"loss": 1},
            train.Checkpoint(str(directory)),
            delete_local_checkpoint_after_upload=True,
        )

    result = fit(function, tmp_path, workers=workers, stop={"training_iteration": 1})
    assert result.stopped is not None
    assert not Path(kept.read_text()).exists()
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "model").read_text() == "weights"


def writes_directly(config: dict[str, Any]) -> list[str]:
    """As with a library that writes checkpoints to their place by itself."""
    storage = train.get_context().get_storage()
    rank = train.get_context().get_world_rank()
    paths = []
    for step in (1, 2):
        path = storage.build_checkpoint_path_from_name(f"step-{step}")
        assert path == storage.build_checkpoint_path_from_name("the same until it is reported")
        if not config["all"]:
            # A rank that reports none doesn't know which checkpoint is the next one.
            path = train.collective.broadcast_from_rank_zero(path)
        storage.storage_filesystem.create_dir(path, recursive=True)
        with storage.storage_filesystem.open_output_stream(f"{path}/part-{rank}") as file:
            file.write(b"%d" % step)
        train.collective.barrier()
        if rank == 0 or config["all"]:
            train.report(
                {"step": step},
                checkpoint=train.Checkpoint(path, storage.storage_filesystem),
                checkpoint_dir_name=f"step-{step}",
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
        paths.append(path)
    return paths


@pytest.mark.parametrize(
    ("workers", "every_rank", "backend", "on_filesystem"),
    [
        (0, True, None, False),
        (2, True, None, False),
        (2, False, train.torch.TorchConfig(), False),
        (2, True, None, True),
        (0, True, None, True),
    ],
)
def test_a_checkpoint_that_is_written_to_the_storage_is_committed_where_it_is(
    tmp_path: Path, workers: int, every_rank: bool, backend: Any, on_filesystem: bool
) -> None:
    filesystem = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    result = train.DataParallelTrainer(
        writes_directly,
        train_loop_config={"all": every_rank},
        backend_config=backend,
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name="run",
            storage_path="runs" if on_filesystem else tmp_path,
            storage_filesystem=filesystem if on_filesystem else None,
            progress=False,
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=1, written_by="every_rank" if every_rank and workers else None
            ),
        ),
    ).fit()
    first, second = result.return_value
    assert result.checkpoint is not None
    assert result.checkpoint.path == second
    result.checkpoint.verify()
    with result.checkpoint.as_directory() as directory:
        found = {file.name: file.read_text() for file in Path(directory).glob("part-*")}
    assert found == {f"part-{rank}": "2" for rank in range(max(1, workers))}
    # Retention deletes the older one, wherever its files came from.
    assert result.filesystem.get_file_info(first).type == pafs.FileType.NotFound


def test_files_at_another_place_are_copied(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model").write_text("weights")
    filesystem = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())

    def function() -> None:
        for checkpoint in (
            train.Checkpoint(str(elsewhere)),
            train.Checkpoint("elsewhere", filesystem),
        ):
            train.report({}, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    result = fit(function, tmp_path)
    for checkpoint, _ in result.best_checkpoints:
        assert Path(checkpoint.path, "model").read_text() == "weights"
    assert len(result.best_checkpoints) == 2
    assert (elsewhere / "model").exists()


def test_a_function_uploads_the_files(tmp_path: Path) -> None:
    def uploads(checkpoint: train.Checkpoint, name: str) -> train.Checkpoint:
        storage = train.get_context().get_storage()
        path = storage.build_checkpoint_path_from_name(name)
        storage.storage_filesystem.create_dir(path)
        pafs.copy_files(
            checkpoint.path,
            path,
            source_filesystem=pafs.LocalFileSystem(),
            destination_filesystem=storage.storage_filesystem,
        )
        Path(path, "name").write_text(name)
        return train.Checkpoint(path, storage.storage_filesystem)

    def function() -> None:
        train.report(
            {},
            train.Checkpoint(str(made())),
            checkpoint_dir_name="mine",
            checkpoint_upload_fn=uploads,
        )

    result = fit(function, tmp_path, workers=2, written_by="rank_0")
    assert result.checkpoint is not None
    files = {each.name: each.read_text() for each in Path(result.checkpoint.path).glob("*")}
    assert {name: files[name] for name in ("model", "name")} == {"model": "weights", "name": "mine"}


def in_place() -> train.Checkpoint:
    storage = train.get_context().get_storage()
    return train.Checkpoint(storage.build_checkpoint_path_from_name("a"))


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: {"checkpoint_upload_mode": "LATER"}, "'LATER' is unknown.*ASYNC, SYNC, NO_UPLOAD"),
    (lambda: {"checkpoint_upload_mode": "SYNC", "upload": "sync"}, "pass one of them"),
    (
        lambda: {"checkpoint_upload_mode": "NO_UPLOAD", "checkpoint_upload_fn": print},
        "NO_UPLOAD. excludes checkpoint_upload_fn",
    ),
    (
        lambda: {
            "checkpoint_upload_mode": "NO_UPLOAD",
            "delete_local_checkpoint_after_upload": True,
        },
        "excludes delete_local_checkpoint_after_upload",
    ),
    (lambda: {"checkpoint_upload_fn": 3}, "checkpoint_upload_fn=3 is not a function"),
    (lambda: {"checkpoint_upload_fn": lambda checkpoint, name: name}, "it returned a str"),
    (lambda: {"checkpoint_dir_name": 3}, "checkpoint_dir_name=3 is not a name"),
    (
        lambda: {"checkpoint": in_place(), "checkpoint_upload_mode": "NO_UPLOAD"},
        "has reported what it has written to .*, which has no files",
    ),
    (
        lambda: {"checkpoint": in_place(), "delete_local_checkpoint_after_upload": True},
        "deletes a directory outside of the storage",
    ),
    (
        lambda: {"checkpoint": train.Checkpoint("none", pafs.LocalFileSystem())},
        "There is no directory 'none'",
    ),
]


@pytest.mark.parametrize(("options", "what"), BAD, ids=[what for _, what in BAD])
def test_options_that_make_no_sense_are_named(
    tmp_path: Path, options: Callable[[], dict[str, Any]], what: str
) -> None:
    def function() -> None:
        train.report({}, **{"checkpoint": train.Checkpoint(str(made())), **options()})

    with pytest.raises(train.TrainingFailedError, match=f"(?s){what}"):
        fit(function, tmp_path)


def test_the_storage_of_a_run(tmp_path: Path) -> None:
    def function() -> tuple[str, ...]:
        storage = train.get_context().get_storage()
        return (
            storage.storage_filesystem.type_name,
            storage.storage_fs_path,
            storage.experiment_fs_path,
            storage.experiment_dir_name,
        )

    assert fit(function, tmp_path).return_value == (
        "local",
        str(tmp_path),
        str(tmp_path / "run"),
        "run",
    )


def test_methods_of_the_context_that_are_not_here_have_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(train.TrainingFailedError, match=r"get_trial_dir: .*experiment_fs_path"):
        fit(lambda: train.get_context().get_trial_dir(), tmp_path)


def reports_three() -> list[tuple[Any, ...]]:
    for step in (1, 2, 3):
        train.report({"step": step}, train.Checkpoint(str(made(str(step)))))
    return [
        (each.metrics, each.status, Path(each.checkpoint.path, "model").read_text())
        for each in train.get_all_reported_checkpoints()
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_function_lists_the_checkpoints_of_its_run(tmp_path: Path, workers: int) -> None:
    committed = train.ReportedCheckpointStatus.COMMITTED
    for values in fit(
        reports_three, tmp_path, workers=workers, num_to_keep=2, written_by="every_rank"
    ).return_values:
        # The third is committed by now, though reports don't wait for that.
        assert values[-1] == ({"step": 3}, committed, "3")
        assert [status for _, status, _ in values] == [committed] * 2


def fails_once() -> list[int]:
    if train.get_context().get_attempt() == 0:
        train.report({"step": 1}, train.Checkpoint(str(made())))
        train.get_checkpoint()
        raise OSError("once")
    return [each.metrics["step"] for each in train.get_all_reported_checkpoints()]


def test_checkpoints_of_earlier_attempts_are_listed(tmp_path: Path) -> None:
    result = train.DataParallelTrainer(
        fails_once,
        scaling_config=train.ScalingConfig(num_workers=1),
        run_config=train.RunConfig(
            storage_path=tmp_path,
            progress=False,
            failure_config=train.FailureConfig(max_failures=1),
        ),
    ).fit()
    assert result.return_value == [1]


def validates(checkpoint: train.Checkpoint, mark: str) -> dict[str, Any]:
    while not Path(mark).exists():
        time.sleep(0.01)
    return {"auc": 0.5}


def waits_for_validations(config: dict[str, Any]) -> list[Any]:
    train.report({"step": 1}, train.Checkpoint(str(made())), validation=True)
    seen = []
    [pending] = train.get_all_reported_checkpoints(train.CheckpointConsistencyMode.COMMITTED)
    seen.append((pending.status.name, dict(pending.metrics)))
    if not config["inline"]:
        with pytest.raises(TimeoutError, match="aren't known in time"):
            train.get_all_reported_checkpoints(timeout_s=0.1)
    Path(config["mark"]).touch()
    [validated] = train.get_all_reported_checkpoints()
    return [*seen, (validated.status.name, dict(validated.metrics))]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_list_waits_for_validations(tmp_path: Path, workers: int) -> None:
    mark = str(tmp_path / "mark")
    result = train.DataParallelTrainer(
        waits_for_validations,
        train_loop_config={"mark": mark, "inline": workers == 0},
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(storage_path=tmp_path, progress=False),
        validation_config=train.ValidationConfig(
            validates, train.ValidationTaskConfig(fn_kwargs={"mark": mark})
        ),
    ).fit()
    assert result.return_value == [
        ("PENDING_VALIDATION", {"step": 1}),
        ("VALIDATED", {"step": 1, "auc": 0.5}),
    ]
