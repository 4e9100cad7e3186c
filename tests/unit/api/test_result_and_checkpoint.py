"""What a user reads from a `Result`, and stores with a `Checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polytrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    Result,
    RunNotFoundError,
    load,
)
from polytrain.api import backend_checks
from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain_plugins import Backend, Engine, UnknownBackendError


def a_checkpoint(path: Path) -> Checkpoint:
    path.mkdir()
    (path / "model").write_text("weights")
    return Checkpoint.from_directory(path)


def test_metadata_is_stored_with_the_files(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path / "one")
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"classes": 3, "name": "a"})
    checkpoint.update_metadata({"name": "b"})
    copied = Checkpoint(checkpoint.to_directory(tmp_path / "two"))
    assert copied.get_metadata() == {"classes": 3, "name": "b"}


def test_a_committed_checkpoint_gets_no_metadata(tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path / "one")
    (tmp_path / "one" / MANIFEST_NAME).write_text("{}")
    for change in (checkpoint.set_metadata, checkpoint.update_metadata):
        with pytest.raises(CheckpointError, match=r"before report\(\)"):
            change({"classes": 3})


def test_a_checkpoint_is_copied_into_a_new_directory(tmp_path: Path) -> None:
    copied = Path(a_checkpoint(tmp_path / "one").to_directory())
    assert (copied / "model").read_text() == "weights"
    assert copied != tmp_path / "one"


KEPT = tuple(
    (Checkpoint(name), metrics)
    for name, metrics in (
        ("a", {"loss": 0.5, "valid": {"auc": 0.7}}),
        ("b", {"loss": 0.2, "valid": {"auc": 0.6}}),
        ("c", {"loss": float("nan")}),
    )
)


@pytest.mark.parametrize(
    ("metric", "mode", "best"),
    [("loss", "min", "b"), ("loss", "max", "a"), ("valid/auc", "max", "a")],
)
def test_the_best_checkpoint_by_a_metric(metric: str, mode: str, best: str) -> None:
    result = Result(path="/runs/one", best_checkpoints=KEPT)
    assert result.get_best_checkpoint(metric, mode) == Checkpoint(best)


def test_a_metric_that_no_checkpoint_has_is_named() -> None:
    result = Result(path="/runs/one", best_checkpoints=KEPT)
    with pytest.raises(ValueError, match=r"no kept checkpoint has a number 'los'.*loss, valid"):
        result.get_best_checkpoint("los", "min")
    with pytest.raises(ValueError, match="mode: 'least' is unknown"):
        result.get_best_checkpoint("loss", "least")


def test_without_a_checkpoint_none_is_best() -> None:
    assert Result(path="/runs/one").get_best_checkpoint("loss", "min") is None


def test_the_history_as_a_data_frame() -> None:
    frame = Result(path="/runs/one", history=({"loss": 2.0}, {"loss": 1.0})).metrics_dataframe
    assert frame["loss"].tolist() == [2.0, 1.0]


def test_a_file_is_no_run(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    file.touch()
    for read in (Result.from_path, load):
        with pytest.raises(RunNotFoundError, match="Pass the run's own directory"):
            read(file)


@dataclass(frozen=True, kw_only=True)
class NeedsAnOption(Backend):
    """A backend that can't be made from its name alone."""

    name: ClassVar[str] = "made"
    depth: int

    def engine(self) -> Engine:
        raise NotImplementedError


@pytest.mark.parametrize("read", [Result.from_path, load])
def test_a_wrong_backend_is_named(
    read: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="backend: 5 is no backend"):
        read(tmp_path, backend=5)
    with pytest.raises(UnknownBackendError, match="No backend is named 'xgbost'"):
        read(tmp_path, backend="xgbost")
    monkeypatch.setattr(backend_checks, "load_backend", lambda name: NeedsAnOption)
    with pytest.raises(ValueError, match=r"backend: 'made' needs depth. .*\(depth=…\)"):
        read(tmp_path, backend="made")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"checkpoint_config": {"num_to_keep": 1}},
            "checkpoint_config: it is a dict. Pass a Check",
        ),
        ({"checkpoint_config": CheckpointConfig(num_to_keep=0)}, "num_to_keep: 0 is not a number"),
    ],
)
def test_a_wrong_argument_is_named(arguments: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Result.from_path(tmp_path, **arguments)


def test_a_name_alone_is_looked_up_in_the_usual_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "polytrain_results" / "quickstart"
    run.mkdir(parents=True)
    (run / "journal.jsonl").write_text("{}")
    for read in (Result.from_path, load):
        with pytest.raises(RunNotFoundError, match=rf"Did you mean {run}\?"):
            read("quickstart")
