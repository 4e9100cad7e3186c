"""Stores of experiments: hostile names, rows that come again, and what importing them brings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polytrain import InvalidJobError, RunConfig, make_trainer
from polytrain.trackers import MLflow, TensorBoard
from polytrain.trackers.mlflow import metric_name
from polytrain.trackers.tracker import Row, TrackedRun

HOSTILE = {"a/b": 0.5, "<script>": 1.5, "q'uo\"te": 2.5, "a//b": 3.5, "../x": 4.5, "/": 5.5}


def run_in(directory: Path, run_id: str = "") -> TrackedRun:
    return TrackedRun(
        name="run",
        address=str(directory),
        key="key",
        run_id=run_id,
        directory=directory,
        options={"params/eta": 0.1, "<b>": "x|y"},
    )


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    """Read event files as TensorBoard does."""
    # With this module, TensorBoard reads without TensorFlow, which takes long to import.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[str, dict[int, float]] = {}
    for tag in events.Tags()["scalars"]:
        for scalar in events.Scalars(tag):
            steps = found.setdefault(tag, {})
            assert scalar.step not in steps
            steps[scalar.step] = scalar.value
    return found


def rows(first: int, last: int, value: float) -> list[Row]:
    return [Row(step=n, time=float(n), metrics={"x": value}) for n in range(first, last + 1)]


def test_tensorboard_shows_each_step_as_it_was_done_last(tmp_path: Path) -> None:
    first = TensorBoard().open(run_in(tmp_path))
    first.write(rows(1, 6, 1.0))
    # Its process dies. The next one doesn't know of the last two rows; then a restart undoes them.
    second = TensorBoard().open(run_in(tmp_path))
    second.write(rows(5, 8, 2.0))
    second.rewind(7)
    second.amend(Row(step=4, time=9.0, metrics={"accuracy": 0.5}))
    second.write(rows(8, 9, 3.0))
    second.finish({"state": "finished"}, succeeded=True)
    second.close()
    values = [1.0] * 4 + [2.0] * 3 + [3.0] * 2
    assert scalars(tmp_path) == {"x": dict(enumerate(values, 1)), "accuracy": {4: 0.5}}


def test_tensorboard_takes_any_name(tmp_path: Path) -> None:
    sink = TensorBoard().open(run_in(tmp_path))
    sink.write([Row(step=1, time=1.0, metrics={**HOSTILE, "text": "no number", "ok": True})])
    sink.close()
    assert scalars(tmp_path) == {name: {1: v} for name, v in {**HOSTILE, "ok": 1.0}.items()}


def test_tensorboard_needs_no_framework(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from polytrain.trackers import TensorBoard
from polytrain.trackers.tracker import Row, TrackedRun
run = TrackedRun(name="r", address="", key="k", run_id="", directory=Path({str(tmp_path)!r}))
sink = TensorBoard().open(run)
sink.write([Row(step=1, time=1.0, metrics={{"x": 1.0}})])
sink.close()
print([name for name in ("torch", "tensorflow") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@settings(max_examples=50)
@given(st.text(max_size=300))
@example("../x")
@example("a//b")
@example("<script>")
@example("")
def test_mlflow_takes_the_name_of_any_metric(name: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    validation._validate_metric_name(metric_name(name))


def test_mlflow_has_a_row_once_however_often_it_comes(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracker = MLflow(uri, experiment="tracked")
    sink = tracker.open(run_in(tmp_path))
    sink.write([Row(step=1, time=1.25, metrics={**HOSTILE, "text": "no number"})])
    # Its process dies before it can note the run: the next one finds it by its key.
    again = tracker.open(run_in(tmp_path))
    assert again.run_id == sink.run_id
    again.write([Row(step=n, time=n * 1.25, metrics=HOSTILE) for n in (1, 2)])
    again.finish({"state": "finished", "goodput": 0.5}, succeeded=True)
    again.close()
    client = MlflowClient(uri)
    run = client.get_run(sink.run_id)
    assert len(run.data.metrics) == len(HOSTILE)
    for name in HOSTILE:
        history = client.get_metric_history(sink.run_id, metric_name(name))
        assert [(each.step, each.timestamp) for each in history] == [(1, 1250), (2, 2500)]
    assert run.data.params["params/eta"] == "0.1"
    assert run.data.tags["polytrain.goodput"] == "0.5"
    assert run.info.status == "FINISHED"
    # What is sent later leaves it as it has ended.
    late = tracker.open(run_in(tmp_path, sink.run_id))
    late.write([Row(step=3, time=3.75, metrics=HOSTILE)])
    late.close()
    assert client.get_run(sink.run_id).info.status == "FINISHED"


def test_mlflow_keeps_no_password() -> None:
    kept: dict[str, Any] = MLflow("https://me:secret@server").options()
    assert kept == {}


def test_a_file_needs_a_path_if_the_run_has_no_directory() -> None:
    run_config = RunConfig(track="csv", storage_path="s3://bucket/runs", name="run")
    with pytest.raises(InvalidJobError, match=r"s3://bucket/runs/run, which isn.t a directory"):
        make_trainer("reference", lambda: None, run_config=run_config)
