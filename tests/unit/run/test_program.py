"""What a driver notes of its program: command, script, and the commit of its code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from polytrain import RunConfig, ScalingConfig, TrainingFailedError, make_trainer
from polytrain.record.entries import CommitFound
from polytrain.record.history import JOURNAL, read_as
from polytrain.record.journal import Journal
from polytrain.run.program import CommitSearch, found_commit
from polytrain.storage.location import Location
from polytrain.view.cli.show import command as show
from polytrain.view.present import RunRecord

SECRET = "correct-horse"
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Make a repository in `tmp_path/code` with a file `train.py`; return a function for git."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    # A repository around the temporary directory isn't that of this code.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    code = tmp_path / "code"
    code.mkdir()

    def run(*arguments: str) -> str:
        command = ["git", "-C", str(code), "-c", "user.name=me", "-c", "user.email=me@here"]
        return subprocess.check_output([*command, *arguments], text=True).strip()

    run("init", "-q", "-b", "main")
    (code / "train.py").write_text("print(1)\n")
    run("add", "train.py")
    run("commit", "-q", "-m", "Train")
    return run


def commit_of(directory: Path) -> CommitFound | None:
    return found_commit(str(directory), str(directory / "train.py"))


def test_a_commit_without_changes(git: Git, tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "notes.txt").write_text("a file that git doesn't know")
    commit = git("rev-parse", "HEAD")
    assert commit_of(code) == CommitFound(commit=commit, branch="main", is_dirty=False)
    git("checkout", "-q", "--detach")
    assert commit_of(code) == CommitFound(commit=commit, is_dirty=False)


def test_code_that_differs_from_its_commit(git: Git, tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "train.py").write_text("print(2)\n")
    changed = commit_of(code)
    assert changed is not None
    assert changed.is_dirty
    git("checkout", "-q", "train.py")
    # The commit lacks the script itself.
    git("rm", "-q", "--cached", "train.py")
    git("commit", "-q", "-m", "Forget", "--allow-empty")
    unknown = commit_of(code)
    assert unknown is not None
    assert unknown.is_dirty


def test_nothing_is_noted_without_git_or_a_repository(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_of(tmp_path) is None
    (tmp_path / "empty").mkdir()
    subprocess.check_call(["git", "init", "-q", str(tmp_path / "empty")])
    assert commit_of(tmp_path / "empty") is None
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path / "code") is None


@pytest.fixture
def git_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a program named git, which prints its process group; return the file of its ends."""
    git, ends = tmp_path / "git", tmp_path / "ends"
    lines = ["import os, sys", "print(os.getpgrp())", f"print(file=open({str(ends)!r}, 'a'))"]
    git.write_text("\n".join([f"#!{sys.executable}", *lines]))
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return ends


@pytest.mark.usefixtures("git_that_ends")
def test_ctrl_c_in_a_terminal_does_not_reach_git(tmp_path: Path) -> None:
    """The terminal's foreground process group gets it."""
    found = found_commit(str(tmp_path), "")
    assert found is not None
    assert int(found.commit) != os.getpgrp()


def test_no_child_process_disturbs_what_trains_in_this_process(
    git_that_ends: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ends: list[int] = []

    def train() -> None:
        ends.append(len(git_that_ends.read_text().splitlines()))

    scaling, run = ScalingConfig(num_workers=0), RunConfig(storage_path=tmp_path, progress=False)
    make_trainer("reference", train, scaling_config=scaling, run_config=run).fit()
    assert ends == [len(git_that_ends.read_text().splitlines())]


def test_the_commit_is_there_when_the_driver_is_woken(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "code")
    woken = threading.Event()
    search = CommitSearch(wake=woken.set, at_once=False)
    assert woken.wait(60)
    with Journal(Location.of(tmp_path / "run").open(), token=1) as journal:
        for _ in range(2):
            search.note(journal)
    [line] = (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    assert json.loads(line)["commit"] == git("rev-parse", "HEAD")


def test_a_run_that_is_resumed_has_the_facts_of_each_driver(
    git: Git,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path / "code")

    def train(config: dict[str, Any]) -> None:
        if config["lr"] > 0.5:
            raise ValueError("it diverges")

    def fit(lr: float) -> None:
        make_trainer(
            "reference",
            train,
            train_loop_config={"lr": lr, "hf_token": SECRET},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=tmp_path),
        ).fit()

    with pytest.raises(TrainingFailedError):
        fit(1.0)
    first = git("rev-parse", "HEAD")
    (tmp_path / "code/train.py").write_text("print(2)\n")
    git("commit", "-q", "-a", "-m", "Train again")
    fit(0.1)
    history = read_as(RunRecord, Location.of(tmp_path / "run").open().read_log(JOURNAL))
    assert history is not None
    assert history.facts.hyperparameters == {"lr": 0.1, "hf_token": "…"}
    programs = history.facts.programs
    assert [each.commit for each in programs] == [first, git("rev-parse", "HEAD")]
    assert [each.is_dirty for each in programs] == [False, False]
    assert {"python", "polytrain-core"} <= programs[0].versions.keys()
    shown = CliRunner().invoke(show, [str(tmp_path / "run")]).output
    assert "  lr = 0.1\n      until driver 2: 1.0\n" in shown
    assert [each.getMessage() for each in caplog.records] == [
        "The run is resumed with other hyperparameters: lr = 0.1 (before: 1.0)."
    ]
    assert f"until driver 2: {first[:12]} (main)" in shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    ("arguments", "command", "has_script"),
    [
        (
            ["program.py", "--lr", "0.1", "--api-key", SECRET, f"--token={SECRET}"],
            ["program.py", "--lr", "0.1", "--api-key", "…", "--token=…"],
            True,
        ),
        (["-m", "program", "x"], ["-m", "program", "x"], True),
        (["-c", f"import program # {SECRET}", "x"], ["-c", "…", "x"], False),
    ],
)
def test_a_command_is_noted_as_it_was_typed(
    tmp_path: Path, arguments: list[str], command: list[str], has_script: bool
) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import json\n"
        "from polytrain.run.program import command_line, script\n"
        "print(json.dumps([command_line(), script()]))\n"
    )
    # Modules of the working directory are found with -m and -c.
    done = subprocess.check_output(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(tmp_path)])},
    )
    typed, script = json.loads(done)
    assert typed == [sys.executable, *command]
    assert script == (str(file) if has_script else "")
