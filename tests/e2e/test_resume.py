"""A run goes on where it was: in another process, at another world size, after a driver's death."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from tests.e2e.driver import PREAMBLE, WITH_RAY, run_driver, start_driver
from tests.faulty_storage import Call, FaultyFileSystem, out
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    DataConfig,
    InvalidJobError,
    Result,
    RunConfig,
    RunNotFoundError,
    RunOwnedError,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    make_trainer,
)
from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.data.shards import assignment
from polytrain.testing.processes import eventually, is_alive, title

ROWS = 64
TABLE = pa.table({"x": list(range(ROWS))})


def add_up(config: Mapping[str, Any]) -> None:
    """Add up the rows of some epochs; stop as if interrupted after some batches, if told to."""
    checkpoint = polytrain.get_checkpoint()
    total, batches = 0, 0
    rank = polytrain.get_context().get_world_rank()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            total, batches = json.loads(Path(directory, "state").read_text())
    shard = polytrain.get_dataset_shard("train")
    while batches < config["batches"]:
        for batch in shard.iter_batches(global_batch_size=8, batch_format="arrow"):
            total += sum(batch["x"].to_pylist())
            batches += 1
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "state").write_text(json.dumps([total, batches]))
                polytrain.report(
                    {"total": total, "batches": batches},
                    checkpoint=None if rank else Checkpoint.from_directory(directory),
                )
            if batches == config.get("stop_at"):
                raise KeyboardInterrupt
            if batches == config["batches"]:
                return


def trainer(config: RunConfig, *, workers: int = 0, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "train_loop_config": {"batches": 16},
        "datasets": {"train": TABLE},
        "dataset_config": {"train": DataConfig(shuffle=True, seed=7)},
        "scaling_config": ScalingConfig(num_workers=workers),
        "run_config": dataclasses.replace(config, name="sums"),
    }
    return make_trainer("reference", add_up, **{**arguments, **options})


def interrupt(config: RunConfig, *, at: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(config, train_loop_config={"batches": 16, "stop_at": at}).fit()


def test_a_run_goes_on_at_its_newest_checkpoint(
    quiet: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(quiet, at=5)
    backup = Path(str(quiet.storage_path), "backup")
    backup.hardlink_to(backup.with_name("sums") / "journal.jsonl")
    with pytest.raises(TrainingFailedError, match=r"journal\.jsonl is also a file elsewhere"):
        trainer(quiet).fit()
    backup.unlink()
    # As another version of polytrain may choose it.
    monkeypatch.setattr(assignment, "_WINDOW_IN_MEMORY", 4)
    interrupt(quiet, at=11)
    result = trainer(quiet).fit()
    assert result.metrics == {"total": 2 * sum(range(ROWS)), "batches": 16}
    assert [metrics["batches"] for metrics in result.history] == list(range(1, 17))
    assert result.restarts == 2
    uninterrupted = trainer(
        dataclasses.replace(quiet, storage_path=f"{quiet.storage_path}/2")
    ).fit()
    assert result.history == uninterrupted.history


def test_it_goes_on_with_another_number_of_workers(quiet: RunConfig) -> None:
    interrupt(quiet, at=5)
    result = trainer(quiet, workers=2).fit()
    # Each rank adds up its half of what is left: rows that both would count come twice.
    assert [metrics["batches"] for metrics in result.history] == list(range(1, 17))
    manifest = json.loads(Path(result.checkpoint.path, "polytrain-manifest.json").read_text())
    assert manifest["manifest"]["world_size"] == 2
    assert manifest["manifest"]["attempt_id"] == {"token": 2, "attempt": 0}


def test_a_finished_run_says_so_and_returns_its_result(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    first = trainer(quiet).fit()
    again = trainer(quiet, workers=2).fit()
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"Nothing was trained: the run in {first.path} is finished")
    assert "RunConfig(if_finished='new')" in message
    assert "RunConfig(name=…)" in message
    assert (again.history, again.checkpoint) == (first.history, first.checkpoint)
    assert again.best_checkpoints == first.best_checkpoints


def test_starting_over_leaves_what_was_there_and_does_not_count_it(quiet: RunConfig) -> None:
    first = trainer(quiet).fit()
    again = trainer(quiet, train_loop_config={"batches": 2}).fit(resume="never")
    assert [metrics["batches"] for metrics in again.history] == [1, 2]
    assert len(again.best_checkpoints) == 2
    first.checkpoint.verify()
    assert Result.from_path(again.path).history == again.history


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dataset_config": {"train": DataConfig(shuffle=True, seed=8)}}, r"\['train'\]\.seed"),
        ({"datasets": {"train": TABLE, "valid": TABLE}}, "datasets: they were train"),
        (
            {"datasets": {"train": TABLE.slice(1)}},
            rf"datasets\['train'\]: .*number of rows {ROWS} then, {ROWS - 1} now.*restore_from",
        ),
        (
            {"dataset_config": DataConfig(shuffle=True, seed=7, datasets_to_split=[])},
            "datasets, for the run in .*split over the workers then, whole on each worker now",
        ),
    ],
)
def test_what_makes_going_on_meaningless_is_refused(
    quiet: RunConfig, changed: Mapping[str, Any], named: str
) -> None:
    interrupt(quiet, at=5)
    with pytest.raises(InvalidJobError, match=named):
        trainer(quiet, **changed).fit()
    # Refused is not lost.
    assert trainer(quiet).fit().metrics["batches"] == 16


@pytest.mark.parametrize("backend", ["reference", "xgboost", "lightgbm"])
def test_training_from_options_does_not_go_on_with_other_rows(
    quiet: RunConfig, backend: str
) -> None:
    """Nor between rounds: nobody would know which model that is. On purpose it does."""
    rounds = "rounds" if backend == "reference" else "num_boost_round"

    def declarative(y: list[float], name: str = "line", **options: Any) -> Result:
        return make_trainer(
            backend,
            datasets={"train": pa.table({"x": [1.0, 2.0, 3.0, 4.0], "y": y})},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=dataclasses.replace(quiet, name=name, **options.pop("config", {})),
            **{"label": "y", rounds: 4, **options},
        ).fit()

    ours, others = [1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0]
    declarative(ours, config={"stop": {"training_iteration": 2}})
    with pytest.raises(InvalidJobError, match=r"datasets\['train'\]: .*\(other column 'y'\)") as e:
        declarative(others)
    [problem] = e.value.problems
    assert "restore_from" in problem.remedy
    begun = Result.from_path(Path(str(quiet.storage_path), "line")).checkpoint
    assert len(declarative(others, "other", restore_from=begun).history) == 2
    assert len(declarative(ours).history) == 4


def test_a_run_without_a_checkpoint_begins_with_any_rows(quiet: RunConfig) -> None:
    def fails(config: Any) -> None:
        raise ValueError(polytrain.get_dataset_shard("train").to_arrow()["x"].to_pylist())

    for rows in ([1], [1, 2]):
        with pytest.raises(TrainingFailedError, match=re.escape(str(rows))):
            make_trainer(
                "reference",
                fails,
                datasets={"train": {"x": rows}},
                scaling_config=ScalingConfig(num_workers=0),
                run_config=dataclasses.replace(quiet, name="run"),
            ).fit()


def test_other_options_are_refused_and_a_longer_run_is_another_run(quiet: RunConfig) -> None:
    def declarative(**options: Any) -> Result:
        return make_trainer(
            "reference",
            datasets={"train": pa.table({"x": [1.0, 2.0], "y": [1.0, 2.0]})},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=dataclasses.replace(quiet, name="line"),
            **{"label": "y", "rounds": 3, **options},
        ).fit()

    declarative()
    with pytest.raises(InvalidJobError, match=r"learning_rate: the run was trained with 0\.1, now"):
        declarative(learning_rate=0.5)
    with pytest.raises(InvalidJobError, match=r"rounds: the run was trained with 3.*restore_from"):
        declarative(rounds=4)


def test_another_backend_is_refused(quiet: RunConfig) -> None:
    interrupt(quiet, at=5)
    other = make_trainer(
        "torch",
        add_up,
        train_loop_config={"batches": 16},
        datasets={"train": TABLE},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=dataclasses.replace(quiet, name="sums"),
    )
    with pytest.raises(InvalidJobError, match="backend: the run was started with 'reference'"):
        other.fit()


def test_a_damaged_checkpoint_is_passed_over_by_the_next_driver(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(quiet, at=5)
    checkpoints = sorted(Path(str(quiet.storage_path), "sums", "checkpoints").iterdir())
    damaged = checkpoints[-1] / "state"
    damaged.write_text(damaged.read_text().replace("5", "6"))
    result = trainer(quiet).fit()
    assert f"{checkpoints[-1]} is damaged" in caplog.text
    assert "state differs from what was committed" in caplog.text
    assert result.metrics == {"total": 2 * sum(range(ROWS)), "batches": 16}
    assert damaged.exists(), "all checkpoints are to be kept"


@pytest.mark.parametrize("damage", ["missing", "empty", "zeros", "first line"])
def test_a_run_with_checkpoints_and_without_a_journal_does_not_start_over_by_itself(
    quiet: RunConfig, damage: str
) -> None:
    first = trainer(quiet, train_loop_config={"batches": 3}).fit()
    journal = Path(first.path, "journal.jsonl")
    text = journal.read_bytes()
    if damage == "missing":
        journal.unlink()
    else:
        lost = {"empty": b"", "zeros": bytes(len(text)), "first line": b"x" + text[1:]}
        journal.write_bytes(lost[damage])
        with pytest.raises(RunNotFoundError, match=r"journal\.jsonl is empty or damaged"):
            Result.from_path(first.path)
    with pytest.raises(InvalidJobError) as caught:
        trainer(quiet).fit()
    [problem] = caught.value.problems
    assert problem.field == "RunConfig.name"
    assert "checkpoints until step 3" in problem.what
    assert f"restore_from={first.checkpoint.path!r}" in problem.remedy
    others = dataclasses.replace(quiet, name="others")
    begun = trainer(
        quiet,
        restore_from=first.checkpoint.path,
        train_loop_config={"batches": 16, "stop_at": 6},
        run_config=others,
    )
    with pytest.raises(KeyboardInterrupt):
        begun.fit()
    # It has a checkpoint of its own, from which it is resumed.
    restored = trainer(quiet, run_config=others).fit()
    assert [metrics["batches"] for metrics in restored.history] == [*range(4, 17)]
    with pytest.raises(InvalidJobError, match="restore_from: it isn't the checkpoint that"):
        trainer(quiet, run_config=others).fit()
    copy = first.checkpoint.to_directory()
    same = trainer(quiet, restore_from=copy, run_config=others).fit()
    assert same.history == restored.history
    again = trainer(quiet, train_loop_config={"batches": 2}).fit(resume="never")
    assert [metrics["batches"] for metrics in again.history] == [1, 2]


def test_a_starting_checkpoint_is_waited_for(
    quiet: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polytrain.storage.calls._FIRST_WAIT_S", 0)
    first = trainer(quiet, train_loop_config={"batches": 3}).fit()
    directory = Path(first.checkpoint.path)
    filesystem = FaultyFileSystem(directory.parent)
    start = Checkpoint(directory.name, filesystem)
    others = dataclasses.replace(quiet, name="others")
    resumed = trainer(quiet, restore_from=start, run_config=others)
    failed: set[Call] = set()

    def fail_once(number: int, call: Call) -> None:
        if call not in failed:
            failed.add(call)
            raise out()

    filesystem.faults.fault = fail_once
    assert resumed.fit().metrics["batches"] == 16
    assert failed


def test_a_second_driver_is_refused_while_the_first_one_works(quiet: RunConfig) -> None:
    def train() -> None:
        if polytrain.get_context().get_attempt() == 0 and not refused:
            refused.append(1)
            with pytest.raises(RunOwnedError, match=rf"process {os.getpid()} on \S+, since 20"):
                driver()
        polytrain.report({"refused": len(refused)})

    def driver() -> Result:
        config = dataclasses.replace(quiet, name="owned")
        inline = ScalingConfig(num_workers=0)
        return make_trainer("reference", train, scaling_config=inline, run_config=config).fit()

    refused: list[int] = []
    assert driver().metrics == {"refused": 1}


SCRIPT = """
import json, tempfile, polytrain_plugins
from pathlib import Path
from polytrain import Checkpoint, Result

def train(config):
    checkpoint = polytrain.get_checkpoint()
    done = int(Path(checkpoint.path, "step").read_text()) if checkpoint else 0
    for step in range(done + 1, 7):
        if step == config["stay_at"]:
            time.sleep(1000)
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            checkpoint = Checkpoint.from_directory(directory)
            # Otherwise the next one may be committed first, and then replaces it.
            polytrain.report({"step": step}, checkpoint=checkpoint, upload="sync")

class Tell:
    @polytrain_plugins.hookimpl
    def polytrain_checkpoint_committed(self, checkpoint):
        print("committed", checkpoint.step, flush=True)

result = make_trainer(
    "reference", train, train_loop_config={"stay_at": STAY_AT},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="run", storage_path="runs", progress=False, observers=(Tell(),)),
).fit()
print(json.dumps([list(result.history), result.restarts]), flush=True)
"""


@pytest.fixture(params=[pytest.param(PREAMBLE, id="alone"), only_in_sweep(WITH_RAY, id="on Ray")])
def killed_driver(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The directory of a run whose driver got SIGKILL when its third checkpoint was committed."""
    driver = start_driver(tmp_path, "STAY_AT = 4\n" + SCRIPT, preamble=request.param)
    try:
        assert driver.stdout is not None
        for expected in (1, 2, 3):
            assert driver.stdout.readline() == f"committed {expected}\n"
        children = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        ours = [
            p for p in children if "polytrain.workers" in title(p) or "ray::RayHost" in title(p)
        ]
        assert eventually(lambda: not any(map(is_alive, ours))), [str(p) for p in ours]
    finally:
        driver.kill()
    return tmp_path


@pytest.mark.sweep
def test_a_killed_driver_leaves_nobody_and_loses_nothing(killed_driver: Path) -> None:
    run = killed_driver / "runs" / "run"
    interrupted = Result.from_path(run)
    assert [metrics["step"] for metrics in interrupted.history] == [1, 2, 3]
    assert interrupted.checkpoint is not None
    assert Path(interrupted.checkpoint.path, "step").read_text() == "3"
    code, output, errors = run_driver(killed_driver, "STAY_AT = 0\n" + SCRIPT)
    assert code == 0, errors
    history, restarts = json.loads(output.splitlines()[-1])
    assert [metrics["step"] for metrics in history] == [1, 2, 3, 4, 5, 6]
    assert restarts == 1
    assert output.startswith("committed 4\n")


def test_a_result_is_read_without_ray(quiet: RunConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(quiet, checkpoint_config=CheckpointConfig(num_to_keep=2))
    result = trainer(config).fit()
    path = tmp_path / "read.py"
    path.write_text(
        "import json, sys\n"
        "from polytrain import Result\n"
        f"result = Result.from_path({result.path!r})\n"
        "assert 'ray' not in sys.modules\n"
        "print(json.dumps([list(result.history), result.checkpoint.path, result.ledger.wall_s]))\n"
    )
    process = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    history, checkpoint, wall_s = json.loads(process.stdout)
    assert history == list(result.history)
    assert checkpoint == result.checkpoint.path
    assert wall_s == pytest.approx(result.ledger.wall_s)
    journal = Path(result.path, "journal.jsonl")
    journal.write_text(journal.read_text().replace('"reference"', '"of another machine"'))
    there = Result.from_path(result.path)
    assert there.history == result.history
    with pytest.raises(CheckpointError, match="isn't installed here"):
        there.load_model()


def test_what_a_run_cannot_start_from_is_refused_before_any_worker_starts(tmp_path: Path) -> None:
    data = {"train": {"x": [1.0, 2.0], "y": [1.0, 2.0]}}

    def trainer(name: str, start: Any, function: Any = None) -> Trainer:
        return make_trainer(
            "reference",
            function,
            restore_from=start,
            **({"rounds": 2, "label": "y", "datasets": data} if function is None else {}),
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name=name, storage_path=tmp_path, progress=False),
        )

    result = trainer("first", None).fit()
    assert result.checkpoint is not None
    for directory in (result.path, f"{result.path}/checkpoints"):
        for function in (None, print):
            with pytest.raises(
                InvalidJobError, match=r"is a run, not one.*Result.checkpoint"
            ) as caught:
                trainer("second", directory, function)
            [problem] = caught.value.problems
            assert problem.field == "restore_from"
            assert f"Result.from_path({result.path!r})" in problem.remedy
    copy = Path(result.checkpoint.to_directory(tmp_path / "copy"))
    model = next(file for file in copy.iterdir() if file.name != MANIFEST_NAME)
    model.write_bytes(model.read_bytes() + b"\n")
    with pytest.raises(InvalidJobError, match=r"a copy that lacks polytrain-manifest\.json"):
        trainer("changed", copy).fit()
    (copy / MANIFEST_NAME).unlink()
    assert trainer("changed", copy).fit().finished
    with pytest.raises(InvalidJobError, match="of the backend 'reference', which 'xgboost' can't"):
        make_trainer(
            "xgboost",
            num_boost_round=2,
            label="y",
            datasets=data,
            restore_from=result.checkpoint,
        )
    # A training function may read whatever it likes.
    make_trainer("xgboost", print, restore_from=result.checkpoint)
    (tmp_path / "own").mkdir()
    trainer("third", tmp_path / "own", print)
