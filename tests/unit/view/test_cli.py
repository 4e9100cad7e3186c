"""The command line, on runs of this process and of drivers that died."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.record.recorded import RUN, journal

import polytrain
from polytrain import (
    Checkpoint,
    FailureConfig,
    RunConfig,
    RunNotFoundError,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    make_trainer,
)
from polytrain.checkpoint.manifest import Manifest
from polytrain.checkpoint.store import CheckpointStore
from polytrain.record.entries import FORMAT, Launched, LoadMeasured, Opened, RunConcluded
from polytrain.record.journal import Journal
from polytrain.run.lease import leased
from polytrain.storage.local import LocalStorage
from polytrain.storage.location import Location
from polytrain.view.cli import main
from polytrain.view.cli.found import active_check, named_run
from polytrain.view.run_state import RunState

DIES = """
import os, sys
import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer

def train():
    polytrain.report({"loss": 0.5})
    os._exit(9)

make_trainer(
    "reference", train, scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="dead", storage_path=sys.argv[1], progress=False),
).fit()
"""


def report_three(directory: Path) -> None:
    for step in range(1, 4):
        print("step", step)
        (directory / "state").write_text(f"{step}")
        saved = Checkpoint.from_directory(directory)
        polytrain.report({"loss": 1 / step, "bound": float("nan")}, checkpoint=saved)


def fail_once() -> None:
    polytrain.report({"loss": 1.0})
    if polytrain.get_context().get_attempt() == 0:
        raise OSError("the disk is away")


def fail_always() -> None:
    raise ValueError("no such column")


def fit(
    storage: Path,
    name: str,
    function: Any,
    config: Mapping[str, Any] | None = None,
    datasets: Mapping[str, Any] | None = None,
) -> None:
    make_trainer(
        "reference",
        function,
        train_loop_config=config,
        datasets=datasets,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            progress=False,
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with a run in each state."""
    storage, work = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("work")
    rows = {"x": [1.0, 2.0, 3.0], "y": [0.0, 1.0, 0.0]}
    fit(storage, "done", lambda: report_three(work), datasets={"train": rows})
    fit(storage, "mended", fail_once)
    with pytest.raises(TrainingFailedError):
        fit(storage, "failed", fail_always)
    driver = subprocess.run([sys.executable, "-c", DIES, str(storage)], capture_output=True)
    assert driver.returncode == 9, driver.stderr
    (storage / "no run").mkdir()
    return storage


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The data that a command prints as JSON."""
    main([*arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema_version"] == 1
    assert answer["command"] == arguments[0]
    return answer["data"]


def test_runs_are_listed_with_their_states(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {row["name"]: row for row in shown(capsys, "runs", str(storage))}
    assert {name: row["state"] for name, row in rows.items()} == {
        "done": "finished",
        "mended": "finished",
        "failed": "failed",
        "dead": "interrupted",
    }
    assert (rows["done"]["reports"], rows["done"]["restarts"]) == (3, 0)
    assert (rows["mended"]["reports"], rows["mended"]["restarts"]) == (1, 1)
    assert rows["dead"]["metrics"] == {"loss": 0.5}
    assert main(["runs", str(storage)]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["NAME", "STATE", "BACKEND"]
    assert [line.split()[0] for line in lines] == ["done", "mended", "failed", "dead"]


def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(storage / "done", tmp_path / "done")
    (tmp_path / "later").mkdir()
    opened = {"time": 1.0, "token": 1, "event": "Opened", "format": 99}
    (tmp_path / "later" / "journal.jsonl").write_text(json.dumps(opened) + "\n")
    later, done = shown(capsys, "runs", str(tmp_path))
    assert (later["name"], later["state"], later["metrics"]) == ("later", "unreadable", None)
    assert "format 99" in later["reason"]
    assert later.keys() == done.keys()
    assert main(["runs", str(tmp_path)]) == 0
    output, errors = capsys.readouterr()
    assert [line.split()[:2] for line in output.splitlines()[1:]] == [
        ["later", "unreadable"],
        ["done", "finished"],
    ]
    assert "format 99" in errors


@pytest.mark.parametrize("command", ["show", "report", "logs", "verify"])
def test_a_file_is_no_run(command: str, storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = storage / "done" / "journal.jsonl"
    assert main([command, str(journal)]) == 3
    assert f"There is no run in {journal}: a run has a journal.jsonl" in capsys.readouterr().err


def test_numbers_that_json_lacks_are_read_by_every_reader(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    main(["show", str(storage / "done"), "--json"])
    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert answer["data"]["metrics"]["bound"] is None


def test_a_run_is_shown_with_what_its_attempts_came_to(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = shown(capsys, "show", str(storage / "mended"))
    first, second = facts["attempts"]
    assert first["failure"] == "USER_ERROR: rank 0: OSError: the disk is away"
    assert second["failure"] is None
    assert second["traceback"] is None
    assert first["traceback"].startswith("Traceback (most recent call last):\n")
    main(["show", str(storage / "mended")])
    last = first["traceback"].rstrip().split("\n")[-1]
    assert f"        {last}" in capsys.readouterr().out.splitlines()
    assert sum(facts["seconds"].values()) == pytest.approx(
        polytrain.Result.from_path(storage / "mended").ledger.wall_s
    )
    assert main(["show", str(storage / "mended")]) == 0
    assert "the disk is away" in capsys.readouterr().out


def test_a_run_that_failed_is_shown_with_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def talk_and_fail() -> None:
        print("reading column x")
        fail_always()

    trainer = make_trainer(
        "reference",
        talk_and_fail,
        scaling_config=ScalingConfig(num_workers=1, cluster="local"),
        run_config=RunConfig(name="it's bad", storage_path=tmp_path, progress="none"),
    )
    with pytest.raises(TrainingFailedError):
        trainer.fit()
    run = tmp_path / "it's bad"
    main(["show", str(run)])
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "to see more" in each]
    program, *arguments = shlex.split(line.partition(": ")[2])
    assert program == "polytrain"
    assert main(arguments) == 0
    assert "reading column x" in capsys.readouterr().out


def test_nested_metrics_have_the_names_that_trackers_give_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, "run", polytrain.report, {"eval": {"accuracy": 0.25}, "loss": 1.0})
    for arguments in (["runs", str(tmp_path)], ["show", str(tmp_path / "run")]):
        assert main(arguments) == 0
        assert "eval/accuracy 0.25, loss 1" in capsys.readouterr().out


def test_a_storage_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path / "rnus")]) == 3
    assert f"There is no directory {tmp_path}/rnus" in capsys.readouterr().err
    file = tmp_path / "train.py"
    file.touch()
    assert main(["runs", str(file)]) == 3
    assert f"Error: {file} is a file. Give a directory of runs." in capsys.readouterr().err


def test_before_the_first_run_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["runs"]) == 0
    assert "There are no runs in" in capsys.readouterr().out


def test_a_run_is_shown_with_its_configuration_and_ranks(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = shown(capsys, "show", str(storage / "done"))
    assert facts["settings"]["run_config.failure_config.max_failures"] == 1
    assert facts["datasets"]["train"]["rows"] == 3
    assert facts["datasets"]["train"]["columns"] == ["x", "y"]
    assert facts["versions"]["polytrain-core"] == version("polytrain-core")
    (rank,) = facts["ranks"]
    node = os.uname().nodename
    assert (rank["node"], rank["device"], rank["rows"]) == (node, "CPU", {"train": 3})
    main(["show", str(storage / "done")])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "run_config.failure_config.max_failures = 1" in lines
    assert f"0    {node}, CPU, 3 rows" in lines
    # A default isn't worth a line.
    assert not any("retry_user_errors" in line for line in lines)


def test_a_run_that_can_be_resumed_has_an_exit_code_of_its_own(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(storage / "dead")]) == 75
    assert "fit() resumes it" in capsys.readouterr().out


def test_ranks_are_shown_with_what_was_measured_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal(Location.of(tmp_path).open(), token=1) as journal:
        journal.write(Opened(anew=True, identity={"backend": "reference"}, world_size=2))
        journal.write(Launched(attempt=0, step=0, start=None, world_size=2))
        journal.write(
            LoadMeasured(
                attempt=0,
                window=0,
                busy=[0.5, 0.25],
                cpu=[2.5, 0.25],
                memory=[2 * 2**20, 2**20],
                gpus=[[], [(0.75, 40 * 2**30), (None, 2**20)]],
            )
        )
        journal.write(RunConcluded(stopped=None, succeeded=True, reason=""))
    main(["show", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    ranks = [line.split(maxsplit=1)[1] for line in lines[lines.index("ranks") + 1 :][:2]]
    assert ranks == [
        "busy 50%, CPU 250%, 2 MiB",
        "busy 25%, CPU 25%, 1 MiB, GPU 75%, GPU memory 40961 MiB",
    ]


def test_the_exit_code_of_show_says_how_the_run_ended(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {name: main(["show", str(storage / name)]) for name in ("done", "failed", "dead")}
    assert codes == {"done": 0, "failed": 1, "dead": 75}
    assert "failed: " in capsys.readouterr().out
    assert main(["show", str(storage / "failed"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["data"]["state"] == "failed"
    assert main(["show", str(storage / "failed"), "-f"]) == 1


def test_a_run_that_was_synced_names_the_driver_that_died(
    storage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "dead"
    shutil.copytree(storage / "dead", run)
    driver = shown(capsys, "show", str(run))["driver"]
    assert main(["sync", str(run), "--to", "csv"]) == 0
    assert (run / "leases" / "000002").exists()
    capsys.readouterr()
    found = shown(capsys, "show", str(run))
    assert (found["state"], found["driver"]) == ("interrupted", driver)
    with leased(Location.of(run).open(), Location.of(run).open(), drives=False):
        assert shown(capsys, "show", str(run))["state"] == "interrupted"


def test_sync_says_what_it_writes_to_a_storage_that_is_read_only(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: LocalStorage, path: str, data: bytes) -> str | None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(LocalStorage, "create", refuse)
    assert main(["sync", str(storage / "done"), "--to", "csv"]) == 1
    said = capsys.readouterr().err
    assert f"{storage / 'done'} can't be written: Read-only file system." in said
    assert "holds the run's lease" in said
    assert "Errno" not in said


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Path]:
    """A run whose driver, this process, has written nothing for an hour."""
    times = [time.time() - 3600 - each for each in (40, 30, 20, 10, 0)]
    storage = Location.of(tmp_path).open()
    identity = {"backend": "reference", "options": {}, "datasets": {}}
    lines = (
        {"event": "Opened", "format": FORMAT, "anew": True, "identity": identity, "world_size": 1},
        {"event": "Launched", "attempt": 0, "step": 0, "start": None, "world_size": 1},
        {"event": "Offered", "phase": "Training", "attempt": 0},
        {"event": "Joined", "rank": 0, "phase": "Training", "attempt": 0},
        {"event": "Reported", "n": 0, "step": 1, "metrics": {"loss": 0.5}},
    )
    with leased(storage, storage) as lease:
        written = [
            json.dumps({"time": at, "token": lease.token, **line}) + "\n"
            for at, line in zip(times, lines, strict=True)
        ]
        (tmp_path / "journal.jsonl").write_text("".join(written))
        yield tmp_path


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_who_no_longer_follows_a_run_is_shown_no_end_of_it(
    stalled: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def press_ctrl_c(seconds: float) -> None:
        raise KeyboardInterrupt

    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=press_ctrl_c)
    monkeypatch.setattr("polytrain.view.cli.following.time", clock)
    # `polytrain show -f RUN && deploy` deploys only what has finished.
    assert main(["show", str(stalled), "--follow", *options]) == 130
    said = capsys.readouterr().out
    assert "start" in said
    assert "interrupted" not in said


def test_a_run_that_another_driver_resumes_at_once_has_not_finished(
    stalled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polytrain.view.cli.following.followed", lambda run, *, as_json: None)
    assert main(["show", str(stalled), "--follow"]) == 75


def test_who_follows_a_run_for_a_reader_that_is_gone_ends(
    stalled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `polytrain show RUN --follow --json | grep -m1 checkpoint_committed`."""

    def expect_no_wait(seconds: float) -> None:
        raise AssertionError("the run is followed on")

    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=expect_no_wait)
    monkeypatch.setattr("polytrain.view.cli.following.time", clock)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            main(["show", str(stalled), "--follow", "--json"])
    assert ended.value.code == 1


@pytest.mark.parametrize("command", ["stop", "stacks"])
def test_a_copy_of_an_active_run_is_not_asked(
    stalled: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its driver, which lives, looks for requests in the original."""
    copy = stalled / "copy"
    shutil.copytree(stalled, copy, ignore=shutil.ignore_patterns("copy"))
    assert main([command, str(copy)]) == 1
    said = capsys.readouterr().err
    assert f"{copy} is a copy of an active run's directory" in said
    assert f"works in {stalled}. Name that directory" in said
    assert not (copy / "requests").exists()


def test_a_stop_says_how_the_asked_driver_ended_though_another_has_resumed_the_run(
    stalled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = stalled / "leases" / "000001"

    def ask(*_: Any, reason: str, **__: Any) -> dict[str, Any]:
        stopped = {"by": "command", "reason": reason}
        end = {"event": "Concluded", "token": 1, "succeeded": False, "reason": "stopped"}
        opened = json.loads((stalled / "journal.jsonl").read_text().split("\n")[0])
        lines = [{"time": time.time(), "stopped": stopped, **end}]
        lines.append({**opened, "token": 2, "anew": False})
        with (stalled / "journal.jsonl").open("a") as journal:
            journal.writelines(json.dumps(line) + "\n" for line in lines)
        shutil.copy(lease, lease.with_name("000002"))
        return {}

    monkeypatch.setattr("polytrain.run.requests.ask", ask)
    assert main(["stop", str(stalled), "--reason", "lunch"]) == 75
    assert capsys.readouterr().out == f"{stalled.name}: stopped by polytrain stop: lunch\n"


def test_a_run_is_active_until_its_driver_releases_the_lease(tmp_path: Path) -> None:
    """After its conclusion trackers get the rest, and nobody can resume it yet."""
    (tmp_path / "journal.jsonl").write_bytes(b"".join(journal(RUN)))
    storage = Location.of(tmp_path).open()
    with leased(storage, storage):
        run = named_run(str(tmp_path))
        assert run.state is RunState.FINISHED
        is_active = active_check(run)
        assert is_active()
    assert not is_active()
    with leased(storage, storage):
        assert not is_active()


def test_a_run_of_another_machine_is_active_until_its_driver_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b"".join(journal(RUN)))
    storage = Location.of(tmp_path).open()
    with leased(storage, storage) as lease:
        file = tmp_path / lease.path
    owner = {**json.loads(file.read_text()), "machine": "another"}

    def write(**changed: Any) -> None:
        file.write_text(json.dumps({**owner, **changed}))

    now = 0.0
    monkeypatch.setattr("polytrain.run.lease.time", SimpleNamespace(monotonic=lambda: now))
    write(released=False)
    is_active = active_check(named_run(str(tmp_path)))
    assert is_active()
    now = 20.0
    write(released=False, beat_monotonic=5.0)
    assert is_active()
    now = 49.0
    assert is_active()
    now = 51.0
    assert not is_active()
    write(released=False, beat_monotonic=10.0)
    assert is_active()
    write(released=True, beat_monotonic=10.0)
    assert not is_active()


def test_a_driver_that_is_silent_is_not_asked(
    stalled: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is suspended, or works where this machine can't look."""
    copy = tmp_path / "copy"
    shutil.copytree(stalled, copy, ignore=shutil.ignore_patterns("copy"))
    lease = copy / "leases" / "000001"
    owner = json.loads(lease.read_text())
    silent = {"root": "s3://runs/it", "beat_monotonic": owner["beat_monotonic"] - 60}
    lease.write_text(json.dumps({**owner, **silent}))
    assert main(["stop", str(copy)]) == 1
    assert "or its driver is suspended" in capsys.readouterr().err
    assert not (copy / "requests").exists()


def test_of_a_run_that_stalls_time_is_counted_until_now(
    stalled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = shown(capsys, "show", str(stalled))
    assert facts["state"] == "running"
    assert facts["seconds"]["train"] == pytest.approx(3610, abs=60)
    assert time.time() - facts["last_report"] == pytest.approx(3600, abs=60)
    assert main(["show", str(stalled)]) == 0
    assert "reports    1: loss 0.5, 60 min ago" in capsys.readouterr().out
    page = shown(capsys, "report", str(stalled))
    assert page["seconds"]["train"] == pytest.approx(3610, abs=60)
    assert sum(each["seconds"] for each in page["spans"]) == pytest.approx(page["wall_s"])


@pytest.mark.parametrize("by_s", [86_400, -86_400])
def test_of_a_run_that_stalls_a_clock_that_is_set_counts_no_time(
    stalled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + by_s)
    facts = shown(capsys, "show", str(stalled))
    assert facts["seconds"]["train"] == pytest.approx(3610, abs=60)
    assert main(["show", str(stalled)]) == 0
    assert "reports    1: loss 0.5, 60 min ago" in capsys.readouterr().out


def test_of_a_driver_elsewhere_time_is_counted_until_its_last_heartbeat(
    stalled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (lease,) = (stalled / "leases").iterdir()
    owner = json.loads(lease.read_text())
    lease.write_text(json.dumps({**owner, "machine": "elsewhere", "beat_at": time.time() - 600}))
    facts = shown(capsys, "show", str(stalled))
    assert facts["state"] == "running"
    assert facts["seconds"]["train"] == pytest.approx(3010, abs=60)
    assert main(["show", str(stalled)]) == 0
    assert "last heartbeat 10 min ago" in capsys.readouterr().out


def report_own_state(config: Mapping[str, Any]) -> None:
    command = [sys.executable, "-m", "polytrain", "show", config["run"], "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    polytrain.report({"state": json.loads(shown)["data"]["state"]})


def test_a_run_at_work_is_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "busy")
    fit(tmp_path, "busy", report_own_state, {"run": run})
    facts = shown(capsys, "show", run)
    assert facts["metrics"] == {"state": "running"}
    assert facts["state"] == "finished"


def test_a_run_is_found_by_its_name_alone(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "polytrain_results").symlink_to(storage)
    assert shown(capsys, "show", "done")["state"] == "finished"


@pytest.mark.parametrize("command", ["show", "logs", "verify"])
def test_a_run_that_is_not_there(
    command: str, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(storage / "no run")]) == 3
    assert "There is no run in" in capsys.readouterr().err


def test_a_storage_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out


def test_a_journal_of_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal.jsonl").write_text(
        '{"time": 1.0, "token": 1, "event": "Opened", "format": 99}\n'
    )
    assert main(["show", str(tmp_path)]) == 1
    assert "99" in capsys.readouterr().err


def test_checkpoints_are_compared_with_their_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    fit(tmp_path, "run", lambda: report_three(work))
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "3 intact, 0 damaged" in capsys.readouterr().out
    *_, newest = sorted((tmp_path / "run" / "checkpoints").iterdir())
    (newest / "state").write_text("4")
    assert main(["verify", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().out
    assert f"damaged  {newest.name}" in printed
    assert "2 intact, 1 damaged" in printed

    damage = CheckpointStore.damage

    def damage_meanwhile(store: CheckpointStore, manifest: Manifest) -> tuple[str, ...]:
        """As if the run's driver deleted the damaged one while it is read."""
        if manifest.directory == newest.name:
            store.delete(newest.name)
        return damage(store, manifest)

    monkeypatch.setattr(CheckpointStore, "damage", damage_meanwhile)
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "2 intact, 0 damaged" in capsys.readouterr().out


def test_a_journal_of_which_a_report_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    fit(tmp_path, "run", lambda: report_three(work))
    journal = tmp_path / "run" / "journal.jsonl"
    lost = next(line for line in journal.read_text().splitlines() if '"Reported"' in line)
    journal.write_text(journal.read_text().replace(lost, "no JSON"))
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "damage     journal.jsonl is damaged: line " in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().out
    assert "1 report of rank 0 after step 0 is missing" in printed
    assert "3 intact, 0 damaged" in printed
    loaded = polytrain.load(tmp_path / "run")
    assert [metrics["loss"] for metrics in loaded.history] == [1 / 2, 1 / 3]
    assert f"{tmp_path / 'run'}: journal.jsonl is damaged: line " in caplog.text
    caplog.clear()
    fit(tmp_path, "run", lambda: report_three(work))
    assert "journal.jsonl is damaged" in caplog.text


def test_a_newest_checkpoint_that_is_gone_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    fit(tmp_path, "run", lambda: report_three(work))
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    # Retention may have deleted older ones.
    shutil.rmtree(checkpoints[0])
    assert main(["verify", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    for each in checkpoints[1:]:
        shutil.rmtree(each)
    assert main(["verify", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().out
    assert f"missing  {checkpoints[-1].name}" in printed
    assert "0 intact, 0 damaged, 1 missing" in printed
    journal = tmp_path / "run" / "journal.jsonl"
    # As if its driver had died.
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(each for each in lines if '"Concluded"' not in each))
    fit(tmp_path, "run", lambda: report_three(work))
    assert f"{checkpoints[-1]}. The run resumes from its start" in caplog.text
    assert main(["verify", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_of_a_progress_bar_in_a_log_the_last_state_is_printed(
    piece: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A log may be too large to be read at once."""
    monkeypatch.setattr("polytrain.view.cli.logs._PIECE", piece)
    (tmp_path / "journal.jsonl").write_bytes(b"".join(journal(RUN)))
    logs = tmp_path / "logs"
    logs.mkdir()
    written = "begin\r\n\r10%\r60%\r100%\n20 \N{DEGREE SIGN}C\n".encode() + b"\xff\n\r20%\xe2"
    (logs / "rank_0.log").write_bytes(written)
    assert main(["logs", str(tmp_path), "--rank", "0"]) == 0
    lines = ["begin", "100%", "20 \N{DEGREE SIGN}C", "\N{REPLACEMENT CHARACTER}"]
    assert capsys.readouterr().out.splitlines() == [*lines, "20%\N{REPLACEMENT CHARACTER}"]


def test_logs_of_a_rank_are_those_of_all_drivers_in_object_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, "run", lambda: None)
    for driver in ("000001", "000002"):
        # Where each driver stores its own, as object storage can't append.
        logs = tmp_path / "run" / "logs" / driver
        logs.mkdir(parents=True)
        (logs / "rank_0.log").write_text(f"written by {driver}\n")
    capsys.readouterr()
    assert main(["logs", str(tmp_path / "run"), "--rank", "0"]) == 0
    assert capsys.readouterr().out == "written by 000001\nwritten by 000002\n"


def test_logs_without_a_line_are_reported(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", str(storage / "done")]) == 0
    assert capsys.readouterr() == ("", "The ranks have printed nothing.\n")


def test_a_rank_that_has_printed_nothing_is_no_error(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", str(storage / "done"), "--rank", "0"]) == 0
    assert capsys.readouterr() == ("", "Rank 0 has printed nothing.\n")


def test_a_rank_that_the_run_does_not_have_is_named(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", str(storage / "done"), "--rank", "3"]) == 1
    assert "--rank: the run has no rank 3. It has 1, counted from 0" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "report", "logs", "stop", "stacks", "verify", "sync"])
def test_a_misspelt_run_gets_the_nearest_one(
    command: str, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, f"{storage}/doen"]) == 3
    assert f"Did you mean {storage}/done? `polytrain runs {storage}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["diff", "done", "doen"], ["predict", "doen", "x.parquet", "-o", "out"]]
)
def test_a_misspelt_name_gets_the_nearest_of_the_usual_place(
    arguments: list[str],
    storage: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "polytrain_results").symlink_to(storage)
    assert main(arguments) == 3
    assert "Did you mean done? `polytrain runs` lists" in capsys.readouterr().err


def test_a_storage_in_place_of_a_run_gets_the_names_of_its_runs(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(storage)]) == 3
    said = capsys.readouterr().err
    assert f"{storage} is a storage, not a run" in said
    assert f"{storage}/done" in said


def test_a_misspelt_run_or_storage_is_answered_in_python_too(storage: Path) -> None:
    with pytest.raises(RunNotFoundError, match=f"Did you mean {storage}/done"):
        polytrain.load(storage / "doen")
    with pytest.raises(RunNotFoundError, match=f"Pass one of its runs: .*{storage}/done"):
        polytrain.load(storage)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["show", "a-run", "--jsn"], "--json"),
        (["run", "--wrokers", "2", "train.py"], "--workers"),
        (["conformance", "xgbost"], "xgboost"),
        (["conformance", "reference", "--set", "lable=y"], "label"),
        (["doctor", "--backend", "torhc"], "torch"),
        (["help", "show"], "polytrain show --help"),
    ],
)
def test_a_misspelt_name_on_the_command_line_gets_the_nearest_one(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said, output = capsys.readouterr().err, capsys.readouterr().out
    assert meant in said
    assert not output


def test_a_wrong_command_line_gets_one_line_that_leads_to_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["show", "a-run", "--port", "80"]) == 2
    assert capsys.readouterr().err == (
        "Error: --port is only for --serve. Add that, or leave --port out.\n"
        "See: polytrain show --help\n"
    )


def test_what_is_wrong_with_a_job_says_nothing_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('backned = "reference"')
    Path("binary.toml").write_bytes(b"\xff\xfe")
    Path("directory.toml").mkdir()
    for name in ("jbo.toml", "job.toml", "binary.toml", "directory.toml", "jbo.py"):
        assert main(["run", name]) == 2
        said = capsys.readouterr().err
        assert name in said
        assert "Usage" not in said
        assert "--help" not in said
    assert main(["run", "jbo.toml"]) == 2
    assert capsys.readouterr().err == "Error: There is no file jbo.toml. Did you mean 'job.toml'?\n"


def test_an_empty_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", ""]) == 2
    assert "RUN is empty" in capsys.readouterr().err
    for arguments in (["runs", ""], ["doctor", "--storage", ""]):
        assert main(arguments) == 2
        assert "The path '' is empty" in capsys.readouterr().err


def test_a_path_that_nothing_can_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["show"], ["new-backend", "river", "--into"]):
        assert main([*arguments, "~nobody-of-this-name/run"]) == 2
        assert "a home directory that isn't known" in capsys.readouterr().err
    assert main(["runs", "n" * 300]) == 1
    assert "can't be read: [Errno 36] File name too long" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    for arguments in (["show", "run"], ["runs", "."], ["run", "train.py"]):
        assert main(arguments) == 2
        assert "the working directory was deleted. Change to" in capsys.readouterr().err


def test_an_unknown_scheme_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "s4://bucket/run"]) == 1
    assert capsys.readouterr().err.count("s4://bucket/run") == 1


def test_a_misspelt_command_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shw", "a-run"]) == 2
    assert "No such command 'shw'. Did you mean 'show'?" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"polytrain {version('polytrain-core')}\n"


IMPORTS_OF_HELP = """
import sys
from polytrain.view.cli import main
from polytrain.view.cli import COMMANDS

slow = {"cloudpickle", "importlib.metadata", "numpy", "polytrain_plugins", "pyarrow", "ray"}
slow |= {"polytrain.workers", "torch"}
assert main(["--help"]) == 0
assert not slow & sys.modules.keys(), slow & sys.modules.keys()
wrong = {command: [command, "--no-such-option"] for command in COMMANDS}
# Its unknown options are pytest's.
wrong["conformance"] = ["conformance"]
for command in COMMANDS:
    for arguments, code in (([command, "--help"], 0), (wrong[command], 2)):
        assert main(arguments) == code, arguments
        found = slow & sys.modules.keys()
        assert not found, (arguments, found)
"""


def test_help_and_a_wrong_option_import_nothing_that_reads_a_run() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", IMPORTS_OF_HELP], capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr


def test_an_output_that_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Python starts a program whose standard output is closed.
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["backends"]) == 0
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["backends"]) == 1
    assert capsys.readouterr().err == "Error: [Errno 28] No space left on device\n"


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shwo"]) == 2
    assert "shwo" in capsys.readouterr().err


def report_once() -> None:
    polytrain.report({"loss": 1.0})


def one_report() -> Trainer:
    def train() -> None:
        polytrain.report({"loss": 1.0})

    return make_trainer("reference", train, scaling_config=ScalingConfig(num_workers=0))


JOB = """
backend = "reference"
train_loop_per_worker = "tests.unit.view.test_cli:fail_once"

[scaling_config]
num_workers = 0

[run_config]
name = "job"
progress = false
failure_config = {max_failures = 1}
"""


def test_a_job_in_a_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # As editors on Windows write it.
    (tmp_path / "job.toml").write_text(JOB, "utf-8-sig")
    file, storage = str(tmp_path / "job.toml"), f"run_config.storage_path={tmp_path}"
    assert main(["run", file, "--set", storage]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/job: finished. loss 1\n"
    assert len(polytrain.load(tmp_path / "job").history) == 1
    again = ["run", "--set", storage, file, "--set=run_config.failure_config.max_failures=0"]
    assert main([*again, "--set", "run_config.name=again"]) == 1
    assert "the disk is away" in capsys.readouterr().err
    held = Location.of(tmp_path / "again").open()
    with leased(held, held):
        assert main([*again, "--set", "run_config.name=again"]) == 1
    assert capsys.readouterr().err.startswith("Error: The run in")


def test_a_trainer_of_a_module_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["run", "tests.unit.view.test_cli:one_report"]) == 0
    assert "finished. loss 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wrokers", "2", "train.py"], "No such option"),
        (["missing.py"], "there is no file 'missing.py'"),
        (["missing.toml"], "There is no file missing.toml"),
        (["nowhere:trainer"], "No module named 'nowhere'"),
        (["tests.unit.view.broken_module:trainer"], "broken_module can't be imported.\nTraceback"),
        (["tests.unit.view.test_cli:fail_always"], "fail_always raises an exception.\nTraceback"),
        (["json:dumps"], "json:dumps"),
        (["tests.unit.view.test_cli:JOB"], "is a str. Name a Trainer"),
        (["tests.unit.view.test_cli:report_once"], "is a training function. Name a Trainer"),
        (["-w", "two", "train.py"], "'two' is not a valid whole number"),
        (["--workers", "2", "json:dumps"], "--workers: only for scripts"),
        (["--set", "a=b", "train.py"], "--set: only for a job"),
        (["job.toml", "--lr=1"], "--lr: a job takes --set KEY=VALUE only"),
        (["json:dumps", "x"], "x: only scripts take arguments"),
        ([], "Missing argument 'WHAT'"),
    ],
)
def test_a_run_that_is_wrong_is_not_begun(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert str(Path(polytrain.__file__).parent) not in said


def test_what_polytrain_says_while_a_module_is_imported_is_said_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "tests.unit.view.misspelt_module:trainer"]) == 2
    assert capsys.readouterr().err.startswith("Error: No backend is named 'xgbost'. Did you mean")


def test_shells_complete_commands_and_runs(tmp_path: Path) -> None:
    fit(tmp_path / "polytrain_results", "higgs", lambda: polytrain.report({"loss": 1.0}))

    def completions(words: str) -> str:
        environment = {
            **os.environ,
            "HOME": str(tmp_path),
            "_POLYTRAIN_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split())),
        }
        program = "from polytrain.view.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert "plain,stacks\n" in completions("polytrain ")
    assert completions("polytrain show ") == "plain,higgs\n"
