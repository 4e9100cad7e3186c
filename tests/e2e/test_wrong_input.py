"""What is wrong with a call is told before anything starts, with the remedy, all at once."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    InvalidJobError,
    RunConfig,
    ScalingConfig,
    make_trainer,
)
from polytrain_plugins import Report, hookimpl

LOCK = threading.Lock()


class Unmarked:
    def polytrain_reported(self, report: Report) -> None: ...


class Marked:
    @hookimpl
    def polytrain_reported(self, report: Report) -> None: ...


class Holder:
    def __init__(self) -> None:
        self.lock = LOCK


def nothing() -> None: ...


def configured(config: dict[str, Any]) -> None: ...


def uses(it: Any) -> Callable[[], Any]:
    """A function that is sent by value, as those of scripts are."""

    def function() -> Any:
        return it

    return function


def two_arguments(trial_id: str, result: dict[str, Any]) -> bool:
    return True


def run(**options: Any) -> dict[str, Any]:
    return {"run_config": RunConfig(**options)}


def scaling(**options: Any) -> dict[str, Any]:
    return {"scaling_config": ScalingConfig(**options)}


def failure(**options: Any) -> dict[str, Any]:
    return run(failure_config=FailureConfig(**options))


def checkpoints(**options: Any) -> dict[str, Any]:
    return run(checkpoint_config=CheckpointConfig(**options))


def rows(count: int) -> dict[str, Any]:
    return {"train": {"x": np.zeros(count), "label": np.zeros(count)}}


FILE = open(os.devnull, "wb")  # noqa: SIM115  # as a user's script leaves it
SECONDS = "Give a number of seconds"
INSIDE = "Create such objects inside the training function"
CASES: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    # backend, arguments, field, what is wrong, remedy
    "observer without hookimpl": (
        "reference",
        run(observers=(Unmarked(),)),
        "RunConfig.observers[0].polytrain_reported",
        "it isn't marked as a hook, and would never be called",
        "Write @hookimpl above it",
    ),
    "observers=obj": (
        "reference",
        run(observers=Marked()),
        "RunConfig.observers",
        "it is a Marked",
        "observers=[…]",
    ),
    "checkpoint_frequency with a training function": (
        "reference",
        checkpoints(checkpoint_frequency=2),
        "CheckpointConfig.checkpoint_frequency",
        "a training function makes its checkpoints itself",
        "call polytrain.report(metrics, checkpoint=…)",
    ),
    "checkpoint_score_attribute is a number": (
        "reference",
        checkpoints(checkpoint_score_attribute=3),
        "CheckpointConfig.checkpoint_score_attribute",
        "3 is not the name of a metric",
        "Give the name of a reported metric",
    ),
    "process_group='ncll'": (
        "torch",
        {"process_group": "ncll"},
        "process_group",
        "torch has no process group 'ncll'",
        "Did you mean 'nccl'?",
    ),
    "a GPU for each worker without use_gpu": (
        "torch",
        scaling(resources_per_worker={"GPU": 1}),
        "ScalingConfig.use_gpu",
        "it is False, and resources_per_worker gives a worker 1 GPU",
        "Use use_gpu=True",
    ),
    "use_gpu with no GPU for a worker": (
        "torch",
        scaling(use_gpu=True, resources_per_worker={"GPU": 0}),
        "ScalingConfig.use_gpu",
        "it is True, and resources_per_worker gives a worker no GPU",
        "Leave 'GPU' out",
    ),
    "{'cpu': 4}": (
        "reference",
        scaling(resources_per_worker={"cpu": 4}),
        "ScalingConfig.resources_per_worker",
        "Ray has no resource 'cpu'",
        "Write 'CPU'",
    ),
    "use_gpu='no'": (
        "reference",
        scaling(use_gpu="no"),
        "ScalingConfig.use_gpu",
        "'no' is neither True nor False",
        "Give True or False",
    ),
    "use_gpu without a GPU": (
        "torch",
        scaling(use_gpu=True),
        "ScalingConfig.use_gpu",
        "this machine has no GPU",
        "Use use_gpu=False",
    ),
    "use_gpu with a torch for CPUs": (
        "torch",
        scaling(use_gpu=True),
        "ScalingConfig.use_gpu",
        "in this environment is built for CPUs only",
        "Install a build of torch for GPUs",
    ),
    **{
        f"infinite {field}": ("reference", arguments, field, "inf is too long", SECONDS)
        for field, arguments in {
            "ScalingConfig.start_timeout_s": scaling(start_timeout_s=math.inf),
            "FailureConfig.hang_timeout_s": failure(hang_timeout_s=math.inf),
            "FailureConfig.load_timeout_s": failure(load_timeout_s=math.inf),
            "FailureConfig.rendezvous_timeout_s": failure(rendezvous_timeout_s=math.inf),
            "FailureConfig.node_cooldown_s": failure(node_cooldown_s=math.inf),
            "FailureConfig.straggler_window_s": failure(straggler_window_s=math.inf),
            "CheckpointConfig.report_timeout_s": checkpoints(report_timeout_s=math.inf),
            "RunConfig.storage_timeout_s": run(storage_timeout_s=math.inf),
            "RunConfig.time_budget_s": run(time_budget_s=math.inf),
        }.items()
    },
    "infinite timeout_s of torch": (
        "torch",
        {"timeout_s": math.inf},
        "timeout_s",
        "inf is not a number of seconds",
        SECONDS,
    ),
    "no time": (
        "reference",
        run(time_budget_s=0),
        "RunConfig.time_budget_s",
        "0 is too short",
        SECONDS,
    ),
    "ports that don't exist": (
        "reference",
        run(ports="65000-66000"),
        "RunConfig.ports",
        "66000: there is no such port",
        "Give ports from 1024 to 65535",
    ),
    "fewer ports than ranks": (
        "tensorflow",
        {**run(ports="30000-30001"), **scaling(num_workers=3, cluster="local")},
        "RunConfig.ports",
        "'30000-30001' allows 2 ports, and one host with 3 ranks needs 3",
        "Allow at least 3, such as '30000-30002'",
    ),
    "name='..'": ("reference", run(name=".."), "RunConfig.name", "'..' can't", "Give a name"),
    "name with NUL": (
        "reference",
        run(name="a\0b"),
        "RunConfig.name",
        "'a\\x00b' can't name a directory",
        "without control characters",
    ),
    "script with NUL": (
        "torch",
        {"script": "a\0b.py"},
        "script",
        "'a\\x00b.py' is not a path",
        "Give the path of a Python file",
    ),
    "name of 300 characters": (
        "reference",
        run(name="a" * 300),
        "RunConfig.name",
        "can't name a directory",
        "at most 255 bytes",
    ),
    "function with a lock": (
        "reference",
        {"train_loop_per_worker": uses(LOCK)},
        "train_loop_per_worker",
        "`it` is a lock",
        INSIDE,
    ),
    "function with an object that holds a lock": (
        "reference",
        {"train_loop_per_worker": uses(Holder())},
        "train_loop_per_worker",
        "`it.lock` is a lock",
        INSIDE,
    ),
    "function with an open file": (
        "reference",
        {"train_loop_per_worker": uses(FILE)},
        "train_loop_per_worker",
        "`it` is a BufferedWriter",
        INSIDE,
    ),
    "function with arguments that hold a lock": (
        "reference",
        {"train_loop_per_worker": functools.partial(configured, {"a": LOCK})},
        "train_loop_per_worker",
        "`train_loop_per_worker.args[0]['a']` is a lock",
        INSIDE,
    ),
    "function with too much data": (
        "reference",
        # Here it takes 8 bytes.
        {"train_loop_per_worker": uses(np.broadcast_to(np.zeros(1), 2**25 + 1))},
        "train_loop_per_worker",
        "it has 256 MiB when it is pickled, of which 'it' has 256; at most 256 are sent",
        "Pass data as datasets={…}",
    ),
    "config with a lock inside": (
        "reference",
        {"train_loop_per_worker": configured, "train_loop_config": {"a": {"b": [1, LOCK]}}},
        "train_loop_config",
        "`train_loop_config['a']['b'][1]` is a lock",
        INSIDE,
    ),
    "empty data set": (
        "reference",
        {"datasets": rows(0)},
        "datasets['train']",
        "it has no rows",
        "Pass a data set with rows",
    ),
    **{
        f"label that isn't a column, {backend}": (
            backend,
            {"train_loop_per_worker": None, "label": "lable", "datasets": rows(8), **options},
            "label",
            "the data set 'train' has no column 'lable'",
            "Did you mean 'label'?",
        )
        for backend, options in {
            "reference": {},
            "xgboost": {},
            "lightgbm": {},
            "tensorflow": {"model": nothing},
        }.items()
    },
    "data at a path that doesn't exist": (
        "reference",
        {"datasets": {"train": "/nowhere/rows.parquet"}},
        "datasets['train']",
        "no file matches '/nowhere/rows.parquet'",
        "Check the path",
    ),
    "checkpoint at a path that doesn't exist": (
        "reference",
        {"restore_from": "/nowhere/checkpoint"},
        "restore_from",
        "there are no files in '/nowhere/checkpoint'",
        "Pass a checkpoint of a run",
    ),
    "stop without limits": ("reference", run(stop={}), "RunConfig.stop", "no limit", "Give limits"),
    "stop=3": ("reference", run(stop=3), "RunConfig.stop", "3 is neither", "Give limits"),
    **{
        f"stop={limits}": ("reference", run(stop=limits), f"RunConfig.stop[{name!r}]", what, remedy)
        for limits, what, remedy in [
            ({"": 1}, "not the name of a metric", "Give names"),
            ({3: 1}, "not the name of a metric", "Give names"),
            ({"training_iteration": 0}, "0 is not a number of steps", "1 or more"),
            ({"training_iteration": ">= 5"}, "'>= 5' is not a number of steps", "1 or more"),
            ({"training_iteration": 1.5}, "1.5 is not a number of steps", "1 or more"),
            ({"auc": math.nan}, "nan is not a limit", "Give a finite number"),
            ({"auc": None}, "None is not a limit", "Give a finite number"),
            ({"auc": "<="}, "'<=' is not a limit", 'such as "<= 0.1"'),
            ({"auc": "== 3"}, "'== 3' is not a limit", 'such as "<= 0.1"'),
            ({"auc": "> inf"}, "'> inf' is not a limit", "Give a finite number"),
            ({"time_total_s": 60}, "no report has the time", "time_budget_s=…"),
        ]
        for name in limits
    },
    "a number for a loss that ranks checkpoints the wrong way": (
        "reference",
        run(
            stop={"loss": 0.1},
            checkpoint_config=CheckpointConfig(checkpoint_score_attribute="loss"),
        ),
        "RunConfig.stop['loss']",
        "0.1 alone is the value to reach, and 'loss' has none",
        'Use checkpoint_score_order="min", or write "<= 0.1" or ">= 0.1"',
    ),
    "stop with two arguments": (
        "reference",
        run(stop=two_arguments),
        "RunConfig.stop",
        "is called with one argument, the report",
        "Let it take one argument",
    ),
    "stop with a lock": (
        "reference",
        run(stop=lambda report, lock=LOCK: lock.locked()),
        "RunConfig.stop",
        "`lock` is a lock",
        "Create such objects inside the function",
    ),
}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert list(tmp_path.iterdir()) == [], "something was started"


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_reported_with_its_remedy(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, given, field, what, remedy = CASES[case]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = given.get("run_config", RunConfig())
    arguments = {"train_loop_per_worker": nothing, **given}
    arguments["run_config"] = dataclasses.replace(config, storage_path=tmp_path)
    with pytest.raises(InvalidJobError) as caught:
        make_trainer(backend, **arguments)
    found = [each for each in caught.value.problems if each.field == field]
    [problem] = [each for each in found if what in each.what] or found
    assert what in problem.what
    assert remedy in problem.remedy


def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError) as caught:
        make_trainer(
            "torch",
            uses(LOCK),
            process_group="ncll",
            timeout_s=math.inf,
            datasets={"train": "/nowhere/rows.parquet"},
            restore_from="/nowhere/checkpoint",
            scaling_config=ScalingConfig(use_gpu="no", resources_per_worker={"cpu": 1}),  # type: ignore[arg-type]
            run_config=RunConfig(
                name="..",
                storage_path=tmp_path,
                observers=(Unmarked(),),
                stop={"loss": "0.1"},
                failure_config=FailureConfig(hang_timeout_s=math.inf),
                checkpoint_config=CheckpointConfig(checkpoint_score_attribute=3),  # type: ignore[arg-type]
            ),
        )
    assert {problem.field for problem in caught.value.problems} == {
        "CheckpointConfig.checkpoint_score_attribute",
        "FailureConfig.hang_timeout_s",
        "RunConfig.name",
        "RunConfig.observers[0].polytrain_reported",
        "RunConfig.stop['loss']",
        "ScalingConfig.resources_per_worker",
        "ScalingConfig.use_gpu",
        "datasets['train']",
        "process_group",
        "restore_from",
        "timeout_s",
        "train_loop_per_worker",
    }


GUARDED = "if __name__ == '__main__': "
SCRIPT = """
import multiprocessing, sys
from polytrain import RunConfig, ScalingConfig, make_trainer

def train():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map({function}, [-3]), flush=True)

{guard}make_trainer(
    "reference",
    train,
    scaling_config=ScalingConfig(num_workers={workers}),
    run_config=RunConfig(storage_path="runs", progress=False),
).fit()
"""


def test_a_script_that_a_spawned_process_imports_is_reported_of_the_guard(tmp_path: Path) -> None:
    """Inline, a training function that starts a process by spawn is the script's own process."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(function="abs", guard="", workers=0))
    with subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        printed = next((line for line in process.stderr if "__main__': a process" in line), "")
        # Its pool starts processes that fail until it is ended.
        process.kill()
    assert "Write `if __name__ == '__main__':` above the lines that make the trainer" in printed
    shutil.rmtree(tmp_path / "runs")
    script.unlink()


@pytest.mark.parametrize(("guard", "workers"), [(GUARDED, 0), ("", 1)])
def test_a_script_whose_spawned_processes_start_no_run_trains(
    tmp_path: Path, guard: str, workers: int
) -> None:
    """With the guard; or without it in a worker process, whose children don't import the script."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(function="abs", guard=guard, workers=workers))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert "[3]" in done.stdout, done.stderr
    shutil.rmtree(tmp_path / "runs")
    script.unlink()


def test_a_function_of_the_script_for_other_processes_is_reported_with_the_way_out(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    defined = "def double(number):\n    return 2 * number\n"
    script.write_text(defined + SCRIPT.format(function="double", guard=GUARDED, workers=1))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert "Can't pickle <function double" in done.stderr
    assert "Move them into a module beside the script" in done.stderr
    shutil.rmtree(tmp_path / "runs")
    script.unlink()


IMPORTED = """
import pathlib
import polytrain

# Without the check the workers' workers would import this, too, without end.
has_run = pathlib.Path("has_run").exists()
pathlib.Path("has_run").touch()

def train():
    print("trained", flush=True)

polytrain.make_trainer(
    "reference",
    train,
    scaling_config=polytrain.ScalingConfig(num_workers=0 if has_run else 1),
    run_config=polytrain.RunConfig(storage_path="runs", progress=False),
).fit()
"""


def test_a_program_that_a_worker_imports_starts_no_workers_there(tmp_path: Path) -> None:
    program, script = tmp_path / "program.py", tmp_path / "script.py"
    program.write_text(IMPORTED)
    script.write_text("import program")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"a worker process imports {program} as the module program" in done.stderr
    assert "Write `if __name__ == '__main__':` above the lines that start them" in done.stderr
    assert "trained" not in done.stdout + done.stderr
    for each in (program, script, tmp_path / "has_run"):
        each.unlink()
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "__pycache__")


def test_a_program_with_the_name_of_its_library_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "xgboost.py"
    program.write_text("import polytrain\npolytrain.make_trainer('xgboost', params={}, label='y')")
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True)
    assert f"would import {program} instead, which has its name. Rename that file" in done.stderr
    program.unlink()
