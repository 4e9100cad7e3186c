"""Files of a run are as private as the user's umask asks for: only whole runs make all of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import polytrain
from polytrain import Checkpoint, RunConfig, ScalingConfig, load, make_trainer
from polytrain.run.requests import NoAnswerError, RequestKind, ask
from polytrain.storage.location import Location
from polytrain.view.cli import main
from polytrain.view.page.ending import write_at_end

LARGE = 1 << 17
"""Bytes of a file that a snapshot links."""


@pytest.fixture(params=[0o077, 0o022, 0o002], ids=lambda umask: f"{umask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def train() -> None:
    directory = Path(polytrain.get_context().get_storage().experiment_fs_path) / "reported"
    print("begins")
    for step in range(1, 4):
        directory.mkdir(exist_ok=True)
        (directory / "small").write_text(str(step))
        (directory / "large").unlink(missing_ok=True)
        (directory / "large").write_bytes(bytes([step]) * LARGE)
        polytrain.report({"loss": 1 / step}, checkpoint=Checkpoint.from_directory(directory))
    polytrain.report({"loss": 0.0})


def modes(*roots: Path) -> dict[str, int]:
    paths = [path for root in roots for path in (root, *root.rglob("*"))]
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in paths}


def wrong_modes(umask: int, *roots: Path) -> dict[str, str]:
    return {
        path: f"{mode:04o}"
        for path, mode in modes(*roots).items()
        if mode != (0o777 if Path(path).is_dir() else 0o666) & ~umask
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_every_file_of_a_run_has_the_mode_that_the_umask_asks_for(
    tmp_path: Path, umask: int, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = make_trainer(
        "reference",
        train,
        scaling_config=ScalingConfig(num_workers=num_workers, cluster="local"),
        run_config=RunConfig(
            name="run",
            storage_path=tmp_path / "runs",
            progress=False,
            track=["csv", "tensorboard"],
        ),
    ).fit()
    run = Path(result.path)
    storage = Location.of(run).open()
    with pytest.raises(NoAnswerError):
        ask(storage, 9, RequestKind.STACKS, timeout_s=0)
    # As a driver that was killed leaves them.
    storage.open_log("journal.jsonl", series="9").draft("{}\n")
    write_at_end(Location.of(run), wall_s=100, reports=4)
    assert main(["report", str(run), "-o", "page.html"]) in (0, None)
    assert {path.name for path in run.iterdir()} >= {
        *("journal.jsonl", "journal.jsonl.drafts-9", "leases", "checkpoints", "report.html"),
        *("metrics.csv", "tensorboard", "trackers", "requests"),
    }
    assert wrong_modes(umask, tmp_path / "runs", tmp_path / "page.html") == {}


def test_predictions_have_the_mode_that_the_umask_asks_for(tmp_path: Path, umask: int) -> None:
    x = np.arange(20.0)
    result = make_trainer(
        "reference",
        label="y",
        datasets={"train": {"x": x, "y": x}},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path / "runs", progress=False),
    ).fit()
    load(result.path).predict({"x": x}, output=tmp_path / "out", num_workers=0)
    assert wrong_modes(umask, tmp_path / "runs", tmp_path / "out") == {}
