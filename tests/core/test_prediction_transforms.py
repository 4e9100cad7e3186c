"""A model gets the rows that it was trained on: with its transform, or after it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import polytrain
from polytrain import (
    Checkpoint,
    DataConfig,
    InvalidJobError,
    Result,
    RunConfig,
    ScalingConfig,
    make_trainer,
)
from polytrain.functions.pickling import code_in
from polytrain.prediction.checks import with_keys
from polytrain.view.cli.job_file import modules_beside_you
from polytrain.view.cli.predict import command

ROWS = {"x": np.arange(40.0), "y": np.arange(40.0) / 39, "id": np.arange(40)}
BY = 39.0


def scaled(batch: dict[str, Any]) -> dict[str, Any]:
    batch["x"] /= BY
    return {name: batch[name] for name in ("x", "y") if name in batch}


def scaled_otherwise(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"] / 10, "y": batch["y"]}


def noisy(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {"x": batch["x"] + rng.normal(size=len(batch["x"])), "y": batch["y"]}


def trained(path: Path, transform: Any = scaled) -> Result:
    return make_trainer(
        "reference",
        label="y",
        datasets={"train": ROWS},
        dataset_config=DataConfig(transform=transform),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=str(path), name="run", progress=False),
    ).fit()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return trained(tmp_path_factory.mktemp("runs"))


def predicted(result: Result, data: Any = ROWS, **options: Any) -> list[float]:
    found: list[float]
    found = np.asarray(result.predict(data, **{"num_workers": 0, **options})).tolist()
    return found


def refusal(result: Result, data: Any = ROWS, **options: Any) -> str:
    with pytest.raises(InvalidJobError) as caught:
        result.predict(data, num_workers=0, **options)
    [problem] = caught.value.problems
    return f"{problem}"


def test_rows_as_they_are_reach_no_model_that_was_trained_on_others(result: Result) -> None:
    problem = refusal(result)
    assert problem.startswith("transform: ")
    assert "transform=…" in problem
    assert "transformed=True" in problem


def test_the_transform_of_the_training_is_applied(result: Result) -> None:
    ready = {"x": ROWS["x"] / BY, "y": ROWS["y"]}
    expected = predicted(result, ready, transformed=True)
    assert predicted(result, transform=scaled) == expected
    assert predicted(result, transformed=True) != expected


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"transform": scaled_otherwise}, "its code differs"),
        ({"transform": noisy}, "at random"),
        ({"transform": "scaled"}, "not a function"),
        ({"transform": scaled, "transformed": True}, "Pass one of the two"),
    ],
)
def test_what_is_not_the_transform_is_refused(
    result: Result, options: dict[str, Any], what: str
) -> None:
    assert what in refusal(result, **options)


def test_a_checkpoint_alone_knows_it(result: Result, tmp_path: Path) -> None:
    assert result.checkpoint is not None
    there = Path(result.checkpoint.to_directory(tmp_path / "copy"))
    alone = polytrain.load(there, backend=result.backend)
    assert "transformed=True" in refusal(alone)
    assert predicted(alone, transform=scaled) == predicted(result, transform=scaled)


def test_a_model_that_was_trained_without_one_takes_none(tmp_path: Path) -> None:
    plain = trained(tmp_path, None)
    assert "trained without one" in refusal(plain, transform=scaled)
    plain.predict(ROWS, num_workers=0)
    plain.predict(ROWS, num_workers=0, transformed=True)


def test_a_model_that_was_trained_on_random_rows_needs_a_word(tmp_path: Path) -> None:
    random = trained(tmp_path, noisy)
    assert "transformed=True" in refusal(random)
    random.predict(ROWS, num_workers=0, transformed=True)


def test_key_columns_are_kept_beside_a_transform(result: Result, tmp_path: Path) -> None:
    pq.write_table(pa.table(ROWS), tmp_path / "rows.parquet")
    out = tmp_path / "out"
    options: dict[str, Any] = {"output": out, "num_workers": 0}
    result.predict(str(tmp_path / "rows.parquet"), transform=scaled, keep=["id", "x"], **options)
    written = pq.read_table(out)
    assert written.column_names == ["id", "x", "prediction"]
    assert written["id"].to_pylist() == ROWS["id"].tolist()
    assert written["x"].to_pylist() == ROWS["x"].tolist()
    assert written["prediction"].to_pylist() == predicted(result, transform=scaled)


MAP_STYLE = """
class Rows:
    def __len__(self):
        return 40

    def __getitem__(self, row):
        return {"x": float(row), "y": row / 39, "id": row}
"""


def test_workers_get_the_transform(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table(ROWS), tmp_path / "rows.parquet")
    expected = predicted(result, transform=scaled)
    # A module that workers can't import.
    there = ModuleType("rows_of_this_process")
    monkeypatch.setitem(sys.modules, there.__name__, there)
    exec(MAP_STYLE, vars(there))
    for data in (ROWS, str(tmp_path / "rows.parquet"), there.Rows()):
        assert predicted(result, data, transform=scaled, num_workers=1) == expected


def test_a_function_is_found_for_workers_that_cannot_import_it() -> None:
    assert scaled in [*code_in(with_keys(scaled, ("id",)))]


def test_a_directory_without_a_manifest_knows_none(result: Result, tmp_path: Path) -> None:
    assert result.checkpoint is not None
    there = Path(result.checkpoint.to_directory(tmp_path / "copy"))
    (there / "polytrain-manifest.json").unlink()
    made = Checkpoint.from_directory(there)
    assert predicted(result, checkpoint=made, transform=scaled) == predicted(
        result, transform=scaled
    )


def test_the_command_line_takes_the_name_of_the_transform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_scaling.py").write_text(
        "def scaled(batch):\n    return {**batch, 'x': batch['x'] / 39}\n"
        "def other(batch):\n    return {**batch, 'x': batch['x'] / 40}\n"
    )
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(ROWS), "rows.parquet")
    with modules_beside_you():
        from their_scaling import scaled  # type: ignore[import-not-found]  # written above
    run = trained(tmp_path, scaled)

    def output(*options: str) -> str:
        given = [run.path, "rows.parquet", "-o", "out", "-w", "0", *options]
        return CliRunner().invoke(command, given).output

    assert "transformed=True" in output()
    assert "its code differs" in output("--transform", "their_scaling:other")
    assert "has no nothing" in output("--transform", "their_scaling:nothing")
    assert "The predictions are in out" in output("--transform", "their_scaling:scaled")
    assert pq.read_table("out")["prediction"].to_pylist() == predicted(run, transform=scaled)
    given = [run.path, "rows.parquet", "-o", "raw", "-w", "0", "--transformed"]
    assert CliRunner().invoke(command, given).exit_code == 0
