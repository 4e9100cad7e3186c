"""Stores of experiments: hostile names, rows that come again, and what importing them brings."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.offline_wandb import closed_records

from polytrain import (
    Checkpoint,
    InvalidJobError,
    RunConfig,
    ScalingConfig,
    get_context,
    make_trainer,
    report,
)
from polytrain.trackers import MLflow, TensorBoard, WandB
from polytrain.trackers.description import Description
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
    )


def description(**parameters: Any) -> Description:
    return Description(
        parameters=parameters,
        command="python train.py --lr 0.1",
        script="/code/train.py",
        commit="0123456789abcdef",
        branch="main",
        environment={"changes": "yes", "version.python": "3.13.0"},
    )


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    """Read event files as TensorBoard does, by its library and by its server's reader."""
    # With this module, TensorBoard reads without TensorFlow, which takes long to import.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_accumulator import (
        EventAccumulator as Served,
    )

    path = str(directory / "tensorboard")
    events, served = EventAccumulator(path, {"scalars": 0}), Served(path, {"tensors": 0})
    events.Reload()
    served.Reload()
    found: dict[str, dict[int, float]] = {}
    for tag in events.Tags()["scalars"]:
        points = [(each.step, each.value) for each in events.Scalars(tag)]
        found[tag] = dict(points)
        assert len(found[tag]) == len(points)
        shown = [(each.step, each.tensor_proto.float_val[0]) for each in served.Tensors(tag)]
        assert shown == points
    texts = {"polytrain/run/text_summary", "polytrain/end/text_summary"}
    hparams = {"_hparams_/session_start_info", "_hparams_/session_end_info"}
    assert set(served.Tags()["tensors"]) - texts - hparams == found.keys()
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


def test_tensorboard_shows_nothing_of_a_run_that_was_started_over(tmp_path: Path) -> None:
    first = TensorBoard().open(run_in(tmp_path))
    first.write([Row(step=n, time=1.0, metrics={"x": 1.0, "old": 2.0}) for n in (1, 2, 3)])
    first.finish({"state": "finished"}, succeeded=True)
    first.close()
    other = tmp_path / "tensorboard" / "events.out.tfevents.17.host.99.0"
    other.write_bytes(b"")
    again = TensorBoard().open(run_in(tmp_path))
    again.rewind(0)
    again.write(rows(1, 2, 5.0))
    again.rewind(0)
    again.write(rows(1, 1, 7.0))
    again.close()
    assert scalars(tmp_path) == {"x": {1: 7.0}}
    # A file that somebody else has put there stays.
    assert other.exists()


def test_tensorboard_keeps_the_files_of_another_run_with_this_name(tmp_path: Path) -> None:
    tracker = TensorBoard(str(tmp_path))
    first = tracker.open(run_in(tmp_path))
    first.write(rows(1, 2, 1.0))
    first.close()
    with pytest.raises(FileExistsError, match="event files that aren't of this run"):
        tracker.open(run_in(tmp_path))
    # It is the same run if it knows the directory.
    tracker.open(run_in(tmp_path, first.run_id))
    assert len(list(tmp_path.glob("run/*.polytrain"))) == 1


def test_tensorboard_takes_any_name(tmp_path: Path) -> None:
    sink = TensorBoard().open(run_in(tmp_path))
    sink.write([Row(step=1, time=1.0, metrics={**HOSTILE, "text": "no number", "ok": True})])
    sink.close()
    assert scalars(tmp_path) == {name: {1: v} for name, v in {**HOSTILE, "ok": 1.0}.items()}


def hparams(directory: Path) -> dict[str, Any]:
    """Return the hyperparameters and the metrics that TensorBoard's tab HPARAMS shows."""
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, list_session_groups
    from tensorboard.plugins.hparams.backend_context import Context

    runs = EventMultiplexer()
    runs.AddRunsFromDirectory(str(directory))
    runs.Reload()
    provider = MultiplexerDataProvider(runs, str(directory))
    context = Context(TBContext(data_provider=provider, multiplexer=runs))
    asked = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=10, include_metrics=True, allowed_statuses=[1, 2, 3]
    )
    handler = list_session_groups.Handler(RequestContext(), context, "", asked)
    (group,) = handler.run().session_groups
    values = {
        name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()
    }
    return {**values, **{each.name.tag: each.value for each in group.metric_values}}


def test_tensorboard_shows_the_hyperparameters(tmp_path: Path) -> None:
    first = TensorBoard().open(run_in(tmp_path))
    first.describe(
        description(**{"lr": 0.25, "optimizer.name": "sgd", "fused": True, "betas": [1, 2]})
    )
    first.write(rows(1, 2, 1.0))
    # A restart from the beginning removes all files.
    first.rewind(0)
    first.write(rows(1, 2, 2.0))
    first.finish({"state": "finished"}, succeeded=True)
    first.close()
    assert scalars(tmp_path) == {"x": {1: 2.0, 2: 2.0}}
    assert hparams(tmp_path) == {
        "lr": 0.25, "optimizer.name": "sgd", "fused": True, "betas": "[1, 2]", "x": 2.0,
    }  # fmt: skip


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
    assert run.data.tags["polytrain.goodput"] == "0.5"
    assert run.info.status == "FINISHED"
    # What is sent later leaves it as it has ended.
    late = tracker.open(run_in(tmp_path, sink.run_id))
    late.write([Row(step=3, time=3.75, metrics=HOSTILE)])
    late.close()
    assert client.get_run(sink.run_id).info.status == "FINISHED"


def test_mlflow_shows_the_hyperparameters_and_the_source(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    sink = MLflow(uri).open(run_in(tmp_path))
    many = {f"layer.{number}": number for number in range(150)}
    sink.describe(description(**{"lr": 0.5, "<b>": "x|y", "long": "x" * 10_000, **many}))
    resumed = MLflow(uri).open(run_in(tmp_path, sink.run_id))
    others = {name: -number for name, number in many.items()}
    resumed.describe(description(**{"lr": 0.25, "epochs": 3, **others}))
    data = MlflowClient(uri).get_run(sink.run_id).data
    assert len(data.params) == 154
    assert (data.params["lr"], data.params["epochs"]) == ("0.5", "3")
    assert data.params["long"].endswith("x…")
    assert data.tags["polytrain.resumed_with.lr"] == "0.25"
    assert data.tags["polytrain.resumed_with.layer.149"] == "-149"
    assert data.tags["mlflow.source.name"] == "/code/train.py"
    assert data.tags["mlflow.source.git.commit"] == "0123456789abcdef"
    assert data.tags["polytrain.command"] == "python train.py --lr 0.1"
    assert data.tags["polytrain.changes"] == "yes"


def test_wandb_shows_the_hyperparameters_as_the_user_has_nested_them(tmp_path: Path) -> None:
    sink = WandB(mode="offline").open(run_in(tmp_path))
    sink.describe(description(**{"lr": 0.5, "optimizer.name": "sgd", "a": 1, "a.b": 2}))
    sink.describe(description(**{"lr": 0.25, "optimizer.betas": [0.9, 0.99]}))
    sink.write(rows(1, 1, 1.0))
    sink.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    config: dict[str, Any] = {}
    for record in closed_records(path):
        for item in record.config.update:
            config["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    config.pop("_wandb", None)
    program = config.pop("polytrain")
    assert config == {
        "lr": 0.25, "optimizer": {"betas": [0.9, 0.99]}, "a": 1, "a.b": 2,
    }  # fmt: skip
    assert program["commit"] == "0123456789abcdef"
    assert program["version"] == {"python": "3.13.0"}


def test_mlflow_has_an_artifact_that_refers_to_the_newest_checkpoint(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    address = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(address)
    client.create_experiment("with checkpoints", str(tmp_path / "artifacts"))
    result = make_trainer(
        "reference",
        _two_checkpoints,
        run_config=RunConfig(
            storage_path=tmp_path / "runs",
            observers=[MLflow(address, "with checkpoints", log_checkpoint=True)],
        ),
        scaling_config=ScalingConfig(num_workers=2, cluster="local"),
    ).fit()
    experiment = client.get_experiment_by_name("with checkpoints")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["checkpoint.json"]
    file = client.download_artifacts(run.info.run_id, "checkpoint.json", str(tmp_path))
    logged = json.loads(Path(file).read_text())
    assert result.checkpoint is not None
    assert logged["path"] == result.checkpoint.path
    assert (logged["step"], logged["metrics"]) == (2, {"loss": 0.5})
    (weights,) = logged["files"]
    content = Path(logged["path"], weights["name"]).read_bytes()
    assert content == b"2"
    assert weights["sha256"] == hashlib.sha256(content).hexdigest()


def _two_checkpoints() -> None:
    for step in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "weights").write_text(str(step))
            checkpoint = Checkpoint.from_directory(directory)
            is_kept = get_context().get_world_rank() == 0
            report({"loss": 1 / step}, checkpoint=checkpoint if is_kept else None)


def test_mlflow_keeps_no_password() -> None:
    kept: dict[str, Any] = MLflow("https://me:secret@server").options()
    assert kept == {"log_checkpoint": False, "system_metrics": False}


def test_a_file_needs_a_path_if_the_run_has_no_directory() -> None:
    run_config = RunConfig(track="csv", storage_path="s3://bucket/runs", name="run")
    with pytest.raises(InvalidJobError, match=r"s3://bucket/runs/run, which isn.t a directory"):
        make_trainer("reference", lambda: None, run_config=run_config)


def wandb_rows(directory: Path) -> list[dict[str, Any]]:
    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for items in (each.history.item for each in closed_records(path) if each.history.item)
    ]


def without_clock(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "_runtime"}


def test_wandb_replaces_an_offline_run_by_a_complete_one(tmp_path: Path) -> None:
    weights = tmp_path / "c2/weights"
    weights.parent.mkdir()
    weights.write_text("1 2 3")
    tracker = WandB(mode="offline", log_checkpoint=True)
    first = tracker.open(run_in(tmp_path))
    first.write(rows(1, 3, 1.0))
    first.close()
    second = tracker.open(run_in(tmp_path, first.run_id))
    assert (second.run_id, second.sent) == (first.run_id, 0)
    validation = Row(step=1, time=9.0, metrics={"accuracy": 0.5, "f*1": 0.5, "": 0.25})
    hostile = {**HOSTILE, "_step": 7}
    second.write(
        [
            Row(step=1, time=1.0, metrics=hostile),
            Row(step=2, time=2.0, metrics=hostile, validation=validation),
        ]
    )
    # Of two that no row takes with it, both are there.
    second.amend(Row(step=1, time=8.0, metrics={"accuracy": 0.25}))
    second.amend(Row(step=2, time=9.0, metrics={"accuracy": 0.75}))
    second.finish({"state": "finished", "checkpoint": str(tmp_path / "c2")}, succeeded=True)
    second.close()
    one = {**HOSTILE, "x_step": 7.0}
    found = [without_clock(row) for row in wandb_rows(tmp_path)]
    assert found == [
        {**one, "_step": 1, "_timestamp": 1.0},
        # W&B itself leaves out what has no name.
        {
            **{**one, "_step": 2, "_timestamp": 2.0, "accuracy": 0.5, "checkpoint_step": 1},
            "f*1": 0.5,
        },
        {"_step": 3, "_timestamp": 8.0, "accuracy": 0.25, "checkpoint_step": 1},
        {"_step": 4, "_timestamp": 9.0, "accuracy": 0.75, "checkpoint_step": 2},
    ]
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    (artifact,) = [each.artifact for each in closed_records(path) if each.HasField("artifact")]
    assert artifact.name == "run-checkpoint"
    assert [entry.ref for entry in artifact.manifest.contents] == [weights.as_uri()]


def test_wandb_replaces_no_other_run_whatever_the_id_is(tmp_path: Path) -> None:
    others = [
        tmp_path / "wandb" / name
        for name in ("offline-run-20240101_000000-other", "offline-run-20240101_000000-a-key")
    ]
    for other in others:
        other.mkdir(parents=True)
    own = tmp_path / "wandb/offline-run-20240101_000000-key"
    own.mkdir()
    link = tmp_path / "wandb/offline-run-20240101_000001-key"
    link.symlink_to(others[0])
    WandB(mode="offline").open(run_in(tmp_path)).close()
    assert not own.exists()
    for pattern in ("*", "?ther", "[a-z]ther"):
        with contextlib.suppress(Exception):
            WandB(mode="offline").open(run_in(tmp_path, pattern)).close()
    assert all(other.is_dir() for other in (*others, link))


def test_a_directory_that_is_a_link_out_of_the_run_is_not_written(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    theirs = elsewhere / "events.out.tfevents.1.host.polytrain"
    theirs.write_bytes(b"")
    for name, tracker in (("tensorboard", TensorBoard()), ("wandb", WandB(mode="offline"))):
        (run / name).symlink_to(elsewhere)
        with pytest.raises(OSError, match="is a symbolic link"):
            tracker.open(run_in(run))
    assert list(elsewhere.iterdir()) == [theirs]


def test_mlflow_adds_nothing_to_a_run_that_is_not_the_trackers(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    theirs = MlflowClient(uri).create_run("0").info.run_id
    with pytest.raises(ValueError, match="isn't that of"):
        MLflow(uri).open(run_in(tmp_path, theirs))


def test_wandb_has_an_offline_run_on_the_disk_once_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def noting(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        sync(number)

    monkeypatch.setattr(os, "fsync", noting)
    sink = WandB(mode="offline").open(run_in(tmp_path))
    # More than two blocks of its file.
    sink.write(rows(1, 1500, 1.0))
    sink.close()
    assert len(wandb_rows(tmp_path)) == 1500
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert path.stat().st_size > 2 * 32 * 1024
    assert {str(path), str(path.parent)} <= set(synced)


@pytest.mark.parametrize(
    ("arguments", "is_kept"),
    [
        (["--lr", "of-ten"], True),
        (["--wandb-key", "hunter-the-2nd"], False),
        (["trainer.api_key=hunter-the-2nd"], False),
        (["--db=postgres://me:hunter-the-2nd@host/db"], False),
    ],
)
def test_wandb_gets_no_key_that_the_driver_was_started_with(
    arguments: list[str], is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb itself stores the command line of its process."""
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    sink = WandB(mode="offline").open(run_in(tmp_path))
    sink.write(rows(1, 2, 1.0))
    sink.close()
    written = b"".join(each.read_bytes() for each in tmp_path.rglob("*") if each.is_file())
    assert b"hunter-the-2nd" not in written
    assert (b"of-ten" in written) is is_kept


def test_wandb_names_a_server_that_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    with socket.socket() as silent:
        # It doesn't listen, and nobody else gets its port.
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracker = WandB(mode="online")
        assert list(tracker.problems()) == []
        with pytest.raises(OSError, match="refused"):
            tracker.open(run_in(tmp_path))


def test_wandbs_server_is_the_one_where_the_user_has_logged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    # As `wandb login --host` writes them.
    (tmp_path / "settings").write_text("[default]\nbase_url = https://wandb.example.com\n")
    [problem] = WandB().problems()
    assert problem.what == "there is no key for https://wandb.example.com"
    (tmp_path / "netrc").write_text("machine wandb.example.com login user password key\n")
    assert list(WandB().problems()) == []
    (tmp_path / "settings").write_text("base_url = https://wandb.example.com\n")
    [problem] = WandB().problems()
    assert problem.what == "there is no key for https://api.wandb.ai"


@pytest.mark.parametrize(
    ("tracker", "environment", "wrong"),
    [
        (WandB(), {}, 'there is no key for https://api.wandb.ai. Run "wandb login"'),
        (WandB(mode="of-line"), {}, "WandB.mode: 'of-line' is not a mode of this tracker"),
        (WandB(), {"WANDB_MODE": "disabled"}, "WANDB_MODE: 'disabled' is not a mode"),
        (WandB(project=""), {"WANDB_MODE": "offline"}, "WandB.project: '' is not text"),
        (WandB(log_checkpoint="yes", mode="offline"), {}, "WandB.log_checkpoint: 'yes' is not"),
        (MLflow(log_checkpoint="yes"), {}, "MLflow.log_checkpoint: 'yes' is not a bool"),
    ],
)
def test_wrong_options_are_named_before_anything_starts(
    tracker: WandB | MLflow,
    environment: dict[str, str],
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    nowhere = dict.fromkeys(("NETRC", "WANDB_CONFIG_DIR"), "/nowhere")
    for name, value in {**nowhere, **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidJobError) as caught:
        make_trainer("reference", lambda: None, run_config=RunConfig(observers=(tracker,)))
    assert wrong in str(caught.value)


def test_the_same_problem_of_two_trackers_is_one_problem() -> None:
    twice = (MLflow(uri=""), MLflow(uri="", experiment="other"))
    with pytest.raises(InvalidJobError) as caught:
        make_trainer("reference", lambda: None, run_config=RunConfig(observers=twice))
    assert str(caught.value).count("MLflow.uri") == 1
