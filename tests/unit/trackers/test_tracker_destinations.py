"""Where `polytrain sync` sends a run: never where only the run's storage says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.unit.record.journal_writer import JournalWriter

from polytrain.storage.location import Location
from polytrain.trackers import CSV, MLflow, TensorBoard, WandB
from polytrain.trackers.destinations import Destination, chosen, sync_command
from polytrain.trackers.state import TrackerState
from polytrain.trackers.tracker import Tracker
from polytrain.view.cli.sync import command

SERVER = "http://mlflow.invalid:5000"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of two steps, whose metric is a line that somebody wants to have written."""
    directory = tmp_path / "run"
    directory.mkdir()
    with JournalWriter(directory) as writer:
        writer.do("report")
        writer.do("report")
        writer.finish()
    return directory


def plant(run: Path, tracker: str, options: dict[str, Any], **more: Any) -> None:
    """Write the state of a tracker, as anybody can who may write to the storage."""
    state = TrackerState(tracker=tracker, options=options)
    state.write(Location.of(run).open())
    file = run / state.file
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def sync(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, [str(run), *arguments], catch_exceptions=False)


def test_a_file_that_only_the_storage_names_is_not_written(run: Path) -> None:
    keys = run.parent / "authorized_keys"
    for path in (keys, run / "../authorized_keys"):
        plant(run, "csv", {"path": str(path)}, run_id="mine")
    done = sync(run)
    assert done.exit_code == 2
    assert not keys.exists()
    assert f"--to csv={keys}" in done.stderr


def test_what_lies_in_the_run_is_sent_without_being_named(run: Path) -> None:
    plant(run, "csv", {"path": str(run / "tables/all.csv")})
    assert sync(run).exit_code == 0
    assert (run / "tables/all.csv").read_text().count("\n") == 3


def test_a_link_in_the_run_leads_nowhere(run: Path) -> None:
    elsewhere = run.parent / "elsewhere"
    elsewhere.mkdir()
    (run / "out").symlink_to(elsewhere)
    plant(run, "csv", {"path": str(run / "out/metrics.csv")})
    assert sync(run).exit_code == 2
    assert not list(elsewhere.iterdir())


def test_a_place_that_the_user_names_gets_the_rows_and_goes_on_where_it_was(run: Path) -> None:
    table = run.parent / "table.csv"
    for _ in range(2):
        assert sync(run, "--to", f"csv={table}").exit_code == 0
    assert table.read_text().splitlines()[0] == "step,time,value/of,xstep"
    assert len(table.read_text().splitlines()) == 3
    # The storage says this place now, and nobody else does.
    assert sync(run).exit_code == 2
    assert sync(run, "--to", "csv").exit_code == 2


def test_a_server_that_only_the_storage_names_is_not_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str | None] = []

    def opening(self: MLflow, run: object) -> None:
        opened.append(self.place)
        raise OSError("no network here")

    monkeypatch.setattr(MLflow, "open", opening)
    monkeypatch.setattr(MLflow, "requires", ())
    plant(run, "mlflow", {"uri": SERVER, "experiment": "Default", "log_checkpoint": False})
    done = sync(run)
    assert (done.exit_code, opened) == (2, [])
    assert f"polytrain sync {run} --to mlflow={SERVER}" in done.stderr
    assert "no network here" in sync(run, "--to", f"mlflow={SERVER}").stderr
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    assert "no network here" in sync(run).stderr
    assert opened == [SERVER, SERVER]


@pytest.mark.parametrize(
    ("kept", "environment", "named"),
    [
        (CSV(), {}, None),
        (CSV("/run/x.csv"), {}, None),
        (CSV("/run/../x.csv"), {}, "csv=/run/../x.csv"),
        (CSV("/else/x.csv"), {}, "csv=/else/x.csv"),
        (TensorBoard(), {}, None),
        (TensorBoard("/else"), {}, "tensorboard=/else"),
        (MLflow(SERVER, "mine"), {"MLFLOW_TRACKING_URI": SERVER}, None),
        (MLflow(SERVER, "mine"), {}, f"mlflow={SERVER}"),
        (MLflow(SERVER, "mine"), {"MLFLOW_TRACKING_URI": "http://own"}, f"mlflow={SERVER}"),
        (MLflow("sqlite:////run/mlflow.db", "mine"), {}, "mlflow=sqlite:////run/mlflow.db"),
        (WandB(mode="offline"), {}, None),
        (WandB(mode="offline", directory="/run/w"), {}, None),
        (WandB(mode="offline", directory="/else"), {}, "wandb=/else"),
        (WandB(mode="offline", directory="/else"), {"WANDB_DIR": "/else"}, "wandb=/else"),
        (
            WandB(mode="offline", directory="/else"),
            {"WANDB_DIR": "/else", "WANDB_MODE": "offline"},
            None,
        ),
        (WandB(mode="online"), {}, None),
        (WandB(mode="online"), {"WANDB_MODE": "offline"}, "wandb=uncategorized"),
        (WandB(mode="online", project="p"), {}, "wandb=p"),
        (WandB(mode="online", project="p"), {"WANDB_PROJECT": "p"}, None),
        (WandB(mode="online", project="p", entity="e", group="g"), {}, "wandb=e/p"),
        (WandB(mode="online", directory="/else"), {}, "wandb=uncategorized"),
    ],
)
def test_what_the_user_has_to_name(
    kept: Tracker, environment: dict[str, str], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found, unconfirmed = chosen([kept], [], Path("/run"))
    assert found == [kept]
    assert unconfirmed == ([] if named is None else [kept])
    command = "polytrain sync /run"
    expected = command if named is None else f"{command} --to {named}"
    assert sync_command(kept, Location.of("/run")) == expected


@pytest.mark.parametrize(
    "kept",
    [
        CSV("/else/x.csv"),
        TensorBoard("/else"),
        MLflow(SERVER, "mine", log_checkpoint=True),
        WandB(mode="offline", directory="/else", group="g"),
        WandB(mode="online", project="p", entity="e", group="g"),
    ],
)
def test_a_place_that_is_named_is_the_same_tracker_with_its_other_options(kept: Tracker) -> None:
    place = kept.place
    assert place is not None
    to = [Destination.of(f"{kept.name}={place}")]
    assert chosen([kept], to, Path("/run")) == ([kept], [])
    assert chosen([kept], to, None) == ([kept], [])


def test_a_database_may_be_named_from_the_working_directory() -> None:
    assert Destination.of("mlflow=sqlite:///../mlflow.db").place == "sqlite:///../mlflow.db"


def test_a_directory_of_wandb_that_the_storage_alone_names_is_not_used() -> None:
    kept = WandB(mode="online", project="p", directory="/else")
    found, unconfirmed = chosen([kept], [Destination.of("wandb=p")], Path("/run"))
    assert unconfirmed == []
    assert [each.resolved().directory for each in found] == [None]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("to", "error"),
    [
        ("csw", "there is no tracker 'csw'. Did you mean 'csv'?"),
        ("csv=", "names no place"),
        ("csv=~nobody-of-this-name/x", "a home directory that isn't known"),
    ],
)
def test_a_destination_that_cannot_be(run: Path, to: str, error: str) -> None:
    done = sync(run, "--to", to)
    assert done.exit_code == 2
    assert error in done.stderr


@pytest.mark.parametrize(
    "content", ["ssh-ed25519 AAAA me@home\n", "a,b\n1,2\n", "export PATH=/bin\n"]
)
def test_a_file_that_does_not_begin_as_ours_stays_as_it_is(run: Path, content: str) -> None:
    (run / "metrics.csv").write_text(content)
    plant(run, "csv", {}, run_id="mine")
    done = sync(run)
    assert (run / "metrics.csv").read_text() == content
    assert "isn't a file of this tracker, and stays as it is" in done.stderr


@pytest.mark.parametrize(
    ("tracker", "run_id"),
    [
        ("wandb", "*"),
        ("wandb", "../../x"),
        ("wandb", "a-*"),
        ("mlflow", "../x"),
        ("mlflow", "*"),
        ("csv", "a\n"),
    ],
)
def test_an_id_that_no_tracker_has_given_is_damage(run: Path, tracker: str, run_id: str) -> None:
    plant(run, tracker, {"mode": "offline"} if tracker == "wandb" else {}, run_id=run_id)
    done = sync(run)
    assert done.exit_code == 1
    assert "'run_id'" in done.stderr
