"""What commands, and the next `fit()`, do with a run in whose directory somebody has planted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import polytrain
from polytrain import (
    Checkpoint,
    PolytrainError,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    make_trainer,
)
from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.run.lease import leased
from polytrain.storage.location import Location
from polytrain.view.cli import main

SECRET = "nobody else's\n"


def report_two(directory: Path) -> None:
    for step in range(1, 3):
        (directory / "rounds.json").write_text(f"{step}")
        print("step", step)
        polytrain.report({"loss": 1 / step}, checkpoint=Checkpoint.from_directory(directory))


def trainer(storage: Path, work: Path, **config: Any) -> Trainer:
    return make_trainer(
        "reference",
        lambda: report_two(work),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=storage, progress=False, **config),
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints, a tracker's file and a log."""
    storage, work = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("work")
    trainer(storage, work, track="csv").fit()
    run = storage / "run"
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "rank_0.log").write_text("step 1\n")
    return run


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "run"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory of the user's, which no test changes."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_text(SECRET)
    yield home
    assert {path.name: path.read_text() for path in home.iterdir()} == {"secret": SECRET}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def linked(path: Path, home: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
        path.symlink_to(home)
    else:
        path.unlink(missing_ok=True)
        path.symlink_to(home / "secret")


def piped(path: Path, home: Path) -> None:
    path.unlink()
    os.mkfifo(path)


READ = ("show", "report", "verify", "logs", "sync", "diff", "predict")

PLANTED: dict[str, tuple[Callable[[Path, Path], None], str, tuple[str, ...]]] = {
    "journal": (linked, "journal.jsonl is a symbolic link", READ),
    "pipe": (piped, "journal.jsonl is a named pipe", READ),
    "leases": (linked, "leases is a symbolic link", READ),
    "checkpoints": (
        linked,
        "checkpoints is a symbolic link",
        ("report", "verify", "diff", "predict"),
    ),
    "logs": (linked, "logs is a symbolic link", ("logs",)),
    "trackers": (linked, "trackers is a symbolic link", ("sync",)),
}

NAMES = {"journal": "journal.jsonl", "pipe": "journal.jsonl"}

CASES = [(what, command) for what, (_, _, commands) in PLANTED.items() for command in commands]


@pytest.mark.parametrize(("what", "command"), CASES)
def test_a_command_names_what_was_planted(
    run: Path, home: Path, what: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, message, _ = PLANTED[what]
    plant(run / NAMES.get(what, what), home)
    more = {"diff": [str(run)], "predict": ["data.csv", "-o", "out"]}.get(command, [])
    assert main([command, str(run), *more]) not in (0, None)
    output, errors = capsys.readouterr()
    assert message in errors
    assert "Remove it" in errors
    assert SECRET not in output + errors


def test_runs_that_cannot_be_read_are_listed_with_the_reason(
    run: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linked(run / "journal.jsonl", home)
    main(["runs", str(run.parent)])
    output, errors = capsys.readouterr()
    assert "unreadable" in output
    assert "journal.jsonl is a symbolic link" in errors


def test_a_run_that_a_link_leads_to_is_a_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "mine").symlink_to(run)
    assert main(["runs", str(tmp_path / "linked")]) in (0, None)
    assert "mine" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "linked" / "mine")]) == 0


@pytest.mark.parametrize("command", ["stop", "stacks"])
def test_nothing_is_asked_for_through_a_link(
    run: Path, home: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "requests").symlink_to(home)
    lines = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    ends = ('"Concluded"', '"Closed"')
    (run / "journal.jsonl").write_text(
        "".join(line for line in lines if not any(end in line for end in ends))
    )
    storage = Location.of(run).open()
    with leased(storage, storage):
        assert main([command, str(run)]) == 1
    assert "requests is a symbolic link" in capsys.readouterr().err


def test_a_log_that_is_a_link_is_not_printed(
    run: Path, home: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    linked(run / "logs" / "rank_0.log", home)
    main(["logs", str(run)])
    assert SECRET not in capsys.readouterr().out
    assert "rank_0.log is a symbolic link" in caplog.text


def test_a_page_takes_the_place_of_a_link(run: Path, home: Path) -> None:
    from polytrain.view.page.ending import NAME, write_at_end

    (run / NAME).symlink_to(home / "secret")
    write_at_end(Location.of(run), wall_s=100, reports=2)
    assert not (run / NAME).is_symlink()
    assert "<html" in (run / NAME).read_text()


@pytest.mark.parametrize("what", ["leases", "journal.jsonl", "checkpoints", "trackers"])
def test_the_next_fit_names_what_was_planted(
    run: Path, home: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    linked(run / what, home)
    (tmp_path / "work").mkdir()
    said = ""
    try:
        trainer(tmp_path, tmp_path / "work", track="csv").fit(resume="never")
    except (OSError, PolytrainError) as error:
        said = str(error)
    assert f"{what} is a symbolic link" in said + caplog.text


@pytest.mark.parametrize("file", ["rounds.json", MANIFEST_NAME])
def test_a_result_says_that_it_leaves_out_the_newest_checkpoint(
    run: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, newest = sorted((run / "checkpoints").iterdir())
    (newest / file).write_text("3")
    (tmp_path / "work").mkdir()
    trained_before = trainer(tmp_path, tmp_path / "work", if_finished="return").fit()
    for result in (Result.from_path(run), trained_before):
        assert result.checkpoint is not None
        assert result.checkpoint.path == str(older)
    assert caplog.text.count(f"{newest} is damaged and is left out") == 2
    assert str(older) not in caplog.text


def test_a_model_is_not_loaded_through_a_link(
    run: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = Result.from_path(run)
    assert result.checkpoint is not None
    (Path(result.checkpoint.path) / "columns.json").symlink_to(home / "secret")
    assert Result.from_path(run).checkpoint != result.checkpoint
    with pytest.raises(polytrain.CheckpointError, match=r"columns\.json is a symbolic link"):
        result.load_model()
