"""Predictions in files: streamed, resumed after a kill, never there twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from tests.e2e.driver import run_driver
from tests.object_storage import S3Server, s3_server

import polytrain
from polytrain import InvalidJobError, PredictionFailedError, Result, RunConfig, make_trainer
from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain.data.read.pieces import SCAN_ROWS
from polytrain.prediction.output_files import OutputFiles
from polytrain.run.lease import leased
from polytrain.storage.filesystems import find
from polytrain.storage.location import Location

ROWS, PART_ROWS = 2000, 250


def table(rows: int = ROWS) -> pa.Table:
    x = np.random.default_rng(0).normal(size=(rows, 2))
    return pa.table({"id": [f"row {i}" for i in range(rows)], "a": x[:, 0], "b": x[:, 1]})


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A linear model of a and b."""
    data = table().drop_columns(["id"])
    data = data.append_column("label", pa.array(data["a"].to_numpy() + 2 * data["b"].to_numpy()))
    return make_trainer(
        "reference",
        label="label",
        datasets={"train": data},
        run_config=RunConfig(
            name="linear", storage_path=tmp_path_factory.mktemp("runs"), progress=False
        ),
        scaling_config=polytrain.ScalingConfig(num_workers=0),
    ).fit()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["s3", "directory"])
def output(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An output that doesn't exist yet: here, and in object storage."""
    if request.param == "directory":
        yield str(tmp_path / "predictions")
        return
    server: S3Server = request.getfixturevalue("server")
    server.set_environment(monkeypatch)
    server.make_bucket("bucket")
    yield "s3://bucket/predictions"
    server.reset()


def read(output: str) -> pa.Table:
    """What any reader of Parquet directories finds."""
    found = find(output)
    whole: pa.Table = pq.read_table(found.path, filesystem=found.filesystem)
    return whole


def test_rows_are_in_their_order_beside_their_keys(result: Result, output: str) -> None:
    found = result.predict(
        table(), output=output, keep=["id"], num_workers=2, rows_per_file=PART_ROWS
    )
    assert found.path == output
    assert found.num_rows == ROWS
    assert len(found.files) == ROWS / PART_ROWS
    stored = read(output)
    assert stored.column_names == ["id", "prediction"]
    assert stored["id"].to_pylist() == table()["id"].to_pylist()
    expected = result.predict(table())
    assert stored["prediction"].to_numpy().tolist() == np.asarray(expected).tolist()


def write_csv(path: Path) -> None:
    for number in range(2):
        half = table().slice(number * 1000, 1000)
        pacsv.write_csv(half, path / f"{number}.csv")


def write_parquet(path: Path) -> None:
    pq.write_table(table(), path / "0.parquet", row_group_size=600)


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_files_are_read_by_the_workers(result: Result, tmp_path: Path, write: Any) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    # Parts of 300 rows: some begin in one file or row group, and end in the next.
    result.predict(
        str(tmp_path / "data"), output=tmp_path / "out", keep=["id"], num_workers=2,
        rows_per_file=np.int64(300),
    )  # fmt: skip
    stored = read(str(tmp_path / "out"))
    assert stored["id"].to_pylist() == table()["id"].to_pylist()
    assert np.allclose(stored["prediction"], result.predict(table()), rtol=1e-12)


RESUMED = f"""
    import numpy as np

    class Rows:
        '''Rows by number, which notes which ones are read. Reading one kills the driver, once.'''

        def __init__(self, driver):
            self.driver = driver

        def __len__(self):
            return {ROWS}

        def __getitem__(self, index):
            with open("read", "a") as file:
                file.write(f"{{index}}\\n")
            if index == 1100 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(self.driver, signal.SIGKILL)
                time.sleep(60)  # this process is killed with its driver
            return {{"id": index, "a": float(index), "b": 0.0}}

    if __name__ == "__main__":
        result = polytrain.load(os.environ["RUN"])
        found = result.predict(
            Rows(os.getpid()), output=os.environ["OUTPUT"], keep=["id"], num_workers=1,
            rows_per_file={PART_ROWS},
        )
        print(found.num_rows)
"""


@pytest.mark.sweep(one_in=2)
def test_a_kill_costs_no_more_than_what_was_not_finished(
    result: Result, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN", result.path)
    monkeypatch.setenv("OUTPUT", output)
    code, _, _ = run_driver(tmp_path, RESUMED)
    assert code == -signal.SIGKILL
    where = OutputFiles(location=Location.of(output))
    before = {name for name in where.names() if name.startswith("part-")}
    assert before == {f"part-{number:05}.parquet" for number in range(4)}
    (tmp_path / "read").unlink()

    code, printed, errors = run_driver(tmp_path, RESUMED)
    assert code == 0, errors
    assert printed.split() == [str(ROWS)]
    rows_read = {int(line) for line in (tmp_path / "read").read_text().split()}
    left = set(range(1000, ROWS))
    assert left <= rows_read
    assert len(rows_read - left) <= 8, "some rows are looked at to recognise the data"
    stored = read(output)
    assert stored["id"].to_pylist() == list(range(ROWS))
    by_hand = result.predict({"a": np.arange(ROWS, dtype=float), "b": np.zeros(ROWS)})
    assert stored["prediction"].to_numpy().tolist() == np.asarray(by_hand).tolist()
    staged = [path for path in where.location.open().list("") if "_staging" in path]
    assert not staged


def test_finished_predictions_are_not_made_again(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = result.predict(table(), output=tmp_path / "out", keep=["id"])
    monkeypatch.setattr(ReferenceEngine, "predictor", None)
    assert result.predict(table(), output=tmp_path / "out", keep=["id"]) == first


def test_a_file_that_is_torn_is_written_again(result: Result, tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep": ["id"], "rows_per_file": PART_ROWS, "num_workers": 0}
    found = result.predict(table(), output=tmp_path / "out", **options)
    record = tmp_path / "out" / "_predictions.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "finished": False}))
    torn, kept = (tmp_path / "out" / name for name in found.files[:2])
    torn.write_bytes(torn.read_bytes()[:-10])
    untouched = kept.stat().st_mtime_ns
    result.predict(table(), output=tmp_path / "out", **options)
    assert read(str(tmp_path / "out"))["id"].to_pylist() == table()["id"].to_pylist()
    assert kept.stat().st_mtime_ns == untouched


@dataclass(frozen=True, kw_only=True)
class Watched(Reference):
    """Notes how many rows are predicted at once, and the bytes that Arrow has then."""

    rows: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def engine(self) -> WatchedEngine:
        return WatchedEngine(self)


class WatchedEngine(ReferenceEngine):
    def predictor(self, directory: Path, **options: Any) -> Any:
        predict, options_of_run = super().predictor(directory, **options), self._options
        assert isinstance(options_of_run, Watched)

        def watched(rows: pa.Table) -> Any:
            options_of_run.rows.append(rows.num_rows)
            options_of_run.memory.append(pa.total_allocated_bytes())
            return predict(rows)

        return watched


def test_few_rows_are_in_memory_at_once(result: Result, tmp_path: Path) -> None:
    rows, zeros = 1_000_000, np.zeros(1_000_000)
    data = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": np.arange(rows), "a": zeros, "b": zeros}), data)
    backend = Watched(label="label")
    before = pa.total_allocated_bytes()
    watched = replace(result, backend=backend)
    watched.predict(data, output=tmp_path / "out", keep=["id"], num_workers=0)
    assert sum(backend.rows) == rows
    assert max(backend.rows) <= SCAN_ROWS
    # All rows together take 24 MB.
    assert max(backend.memory) - before < 12_000_000
    assert read(str(tmp_path / "out"))["id"].to_numpy().tolist() == list(range(rows))


def test_batch_size_limits_what_the_model_gets(result: Result) -> None:
    backend = Watched(label="label")
    few = replace(result, backend=backend).predict(table(), batch_size=7)
    assert max(backend.rows) == 7
    assert np.asarray(few).tolist() == np.asarray(result.predict(table())).tolist()


def test_a_second_process_is_refused(result: Result, output: str) -> None:
    lock = OutputFiles(location=Location.of(output)).lock
    with (
        leased(lock.open(), lock.open()),
        pytest.raises(InvalidJobError, match=f"being worked on by process {os.getpid()}"),
    ):
        result.predict(table(), output=output)
    result.predict(table(), output=output)
    assert read(output).num_rows == ROWS


class Fatal:
    """Rows of which one kills the worker that reads it: always, or once."""

    def __init__(self, marker: Path, *, always: bool) -> None:
        self._marker = marker
        self._always = always

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 900 and (self._always or not self._marker.exists()):
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": index, "a": 0.0, "b": 0.0}


def test_a_lost_worker_is_replaced(result: Result, tmp_path: Path) -> None:
    data = Fatal(tmp_path / "marker", always=False)
    result.predict(
        data, output=tmp_path / "out", keep=["id"], num_workers=2, rows_per_file=PART_ROWS
    )
    assert read(str(tmp_path / "out"))["id"].to_pylist() == list(range(ROWS))
    assert (tmp_path / "marker").exists()


def test_rows_that_kill_their_worker_are_named(result: Result, tmp_path: Path) -> None:
    data = Fatal(tmp_path / "marker", always=True)
    with pytest.raises(PredictionFailedError, match=r"rows 750 to 999.*killed by SIGKILL"):
        result.predict(data, output=tmp_path / "out", num_workers=1, rows_per_file=PART_ROWS)


def test_what_the_model_raises_is_raised_as_it_is(result: Result) -> None:
    with pytest.raises(TypeError, match="has no option colour") as caught:
        result.predict(table(), num_workers=1, colour="red")
    assert "In the worker process" in "".join(caught.value.__notes__)


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all at once": (
        {"keep": ["nope"], "num_workers": -1, "batch_size": 0, "rows_per_file": 1.5},
        [
            "num_workers: -1 is not a number of workers",
            "batch_size: 0 is not a number of rows",
            "rows_per_file: 1.5 is not a number of rows",
            "keep: the data has no column 'nope'",
        ],
    ),
    "a name for a list": ({"keep": "id"}, ["keep: 'id' is not a list.*keep=\\['id'\\]"]),
    "a number for a list": ({"keep": 5}, ["keep: 5 is not a list of columns.*keep=\\['id'\\]"]),
    "a key that is no name": ({"keep": iter([5])}, ["keep: 5 is not the name of a column"]),
    "a key twice": ({"keep": ["id", "id"]}, ["keep: 'id' is there twice"]),
    "a key that collides": (
        {"keep": ["id"], "prediction_column": "id"},
        ["keep: the predictions' column is called 'id' too.*prediction_column="],
    ),
    "no name": ({"prediction_column": ""}, ["prediction_column: '' is not a name"]),
    "a device that it has no use for": ({"use_gpu": True}, ["use_gpu: the reference backend uses"]),
    "neither true nor false": ({"use_gpu": "yes"}, ["use_gpu: 'yes' is neither"]),
    "files for an array": (
        {"output": None, "keep": ["id"], "rows_per_file": 5},
        ["rows_per_file: there are no files", "keep: without an output"],
    ),
    "an output that can't be written": (
        {"output": "/proc/predictions"},
        ["output: '/proc' can't be written to"],
    ),
    "an output of another service": ({"output": "s4://b/c"}, ["output: .*s4"]),
    "a password": ({"output": "s3://me:secret@b/c"}, ["output: .*password"]),
    "no data": ({"data": 42}, ["data: an int is not a data set"]),
    "columns that are missing": (
        {"data": {"id": [1], "A": [1.0]}},
        ["data: it has no column 'a'.*Did you mean 'A'", "data: it has no column 'b'"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named_before_anything_starts(
    result: Result, tmp_path: Path, case: str
) -> None:
    arguments, expected = WRONG[case]
    arguments = {"data": table(), "output": tmp_path / "out", **arguments}
    with pytest.raises(InvalidJobError) as caught:
        result.predict(**arguments)
    assert len(caught.value.problems) == len(expected)
    for text in expected:
        assert caught.match(text)
    assert not (tmp_path / "out").exists()


def test_an_output_with_something_else_is_left_alone(result: Result, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidJobError, match=r"output: .* has files that aren't predictions"):
        result.predict(table(), output=tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_an_output_of_other_data_is_refused(result: Result, tmp_path: Path) -> None:
    result.predict(table(), output=tmp_path / "out")
    with pytest.raises(InvalidJobError, match=r"output: .* has predictions of different data"):
        result.predict(table(ROWS - 1), output=tmp_path / "out")
    with pytest.raises(InvalidJobError, match=r"keep: the predictions in .* were begun with"):
        result.predict(table(), output=tmp_path / "out", keep=["id"])


class Items:
    """A map-style data set, made anew by each driver."""

    def __init__(self, factor: float) -> None:
        self.rows = np.arange(500) * factor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"a": self.rows[index], "b": 1.0}


def test_an_output_of_other_items_is_refused(result: Result, tmp_path: Path) -> None:
    before = result.predict(Items(1.0), output=tmp_path / "out")
    assert result.predict(Items(1.0), output=tmp_path / "out") == before
    with pytest.raises(InvalidJobError, match=r"output: .* has predictions of different data"):
        result.predict(Items(2.0), output=tmp_path / "out")


def test_another_process_predicts_with_no_more_than_the_path(
    result: Result, tmp_path: Path
) -> None:
    script = """
import sys, polytrain
result = polytrain.load(sys.argv[1])
print(float(result.predict({"a": [1.0], "b": [1.0]})[0]), result.metrics["train-mse"])
assert "ray" not in sys.modules
"""
    assert result.checkpoint is not None
    expected = result.predict({"a": [1.0], "b": [1.0]})
    for path in (result.path, result.checkpoint.path):
        ended = subprocess.run(
            [sys.executable, "-c", script, path],
            check=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip
        prediction, error = map(float, ended.stdout.split())
        assert prediction == np.asarray(expected)[0]
        assert error == result.metrics["train-mse"]


def test_a_copied_checkpoint_needs_the_name_of_its_backend(result: Result, tmp_path: Path) -> None:
    assert result.checkpoint is not None
    copy = result.checkpoint.to_directory(tmp_path / "copy")
    with pytest.raises(polytrain.CheckpointError, match="backend="):
        polytrain.load(copy)
    found = polytrain.load(copy, backend="reference").predict(table())
    assert np.asarray(found).tolist() == np.asarray(result.predict(table())).tolist()
    weights = Path(copy, "coefficients.npy")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(polytrain.CheckpointError, match=r"coefficients\.npy .* differs from what"):
        polytrain.load(copy, backend="reference")


def test_a_path_with_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(polytrain.RunNotFoundError, match="There is no run in"):
        polytrain.load(tmp_path)
