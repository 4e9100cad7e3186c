"""Reading a run's directory runs nothing, whatever somebody has put into its files."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polytrain import Result, RunConfig, ScalingConfig, make_trainer
from polytrain.checkpoint.manifest import MANIFEST_NAME, parse_manifest


class Bomb:
    """Makes a directory, wherever it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def fit(quiet: RunConfig, backend: str) -> Path:
    """The directory of a finished run."""
    x = np.arange(60.0)
    result = make_trainer(
        backend,
        label="y",
        num_boost_round=2,
        datasets={"train": {"x": x, "y": 2 * x}},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=quiet,
    ).fit()
    return Path(result.path)


def replace_file(file: Path, content: bytes) -> None:
    """Put something else into a file, and into the manifest that it is what was committed."""
    file.write_bytes(content)
    path = file.parent / MANIFEST_NAME
    if file == path or not path.exists():
        return
    manifest = parse_manifest(path.read_bytes())
    digest = hashlib.sha256(content).hexdigest()
    files = tuple(
        replace(each, size=len(content), sha256=digest) if each.name == file.name else each
        for each in manifest.files
    )
    path.write_text(replace(manifest, files=files).to_json())


def loaded(run: Path) -> Any:
    """The model of a run, or what was raised."""
    try:
        return Result.from_path(run).load_model()
    except Exception as error:
        return error


@pytest.mark.parametrize("backend", ["xgboost", "lightgbm"])
def test_no_file_of_a_run_is_unpickled(quiet: RunConfig, backend: str, tmp_path: Path) -> None:
    """Each in turn is a pickle. `tests/plugin_torch` and `tests/plugin_tf` have their formats'."""
    run = fit(quiet, backend)
    assert not isinstance(loaded(run), Exception)
    mark = tmp_path / "mark"
    refused = []
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    for file in files:
        hostile = tmp_path / "hostile"
        shutil.copytree(run, hostile)
        replace_file(hostile / file, pickle.dumps(Bomb(mark)))
        if isinstance(loaded(hostile), Exception):
            refused.append(file.name)
        assert not mark.exists(), file
        shutil.rmtree(hostile)
    assert {MANIFEST_NAME, *(file.name for file in files if "model" in file.name)} <= {*refused}
