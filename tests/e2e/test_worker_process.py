"""What a training function finds around it: its process, and Ray."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.driver import PREAMBLE, WITH_RAY, run_driver

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    FailureKind,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)


def run(
    function: Any,
    quiet: RunConfig,
    capfd: pytest.CaptureFixture[str],
    backend: str = "reference",
) -> list[Any]:
    """What each rank has printed as JSON, in rank order."""
    make_trainer(
        backend, function, scaling_config=ScalingConfig(num_workers=2), run_config=quiet
    ).fit()
    lines = capfd.readouterr().out.splitlines()
    found = {line[: len("(rank 0)")]: json.loads(line[len("(rank 0) ") :]) for line in lines}
    return [found["(rank 0)"], found["(rank 1)"]]


def draw() -> None:
    import json
    import random
    import sys

    import numpy as np

    drawn = [random.random(), np.random.default_rng().random(), np.random.random()]
    if "tensorflow" in sys.modules:
        import keras
        import tensorflow as tf

        layers = float(keras.random.uniform(()))
        drawn += [float(tf.random.uniform(())), float(tf.random.get_global_generator().uniform(()))]
        drawn.append(layers)
    elif "torch" in sys.modules:
        import torch

        drawn += [float(torch.rand(())), float(torch.nn.Linear(1, 1).weight)]
    print(json.dumps(drawn))


@pytest.mark.parametrize("backend", ["reference", "torch", "tensorflow"])
def test_ranks_and_runs_draw_different_random_numbers(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str], backend: str
) -> None:
    """All are forks of one process, whose generators they would go on with."""
    again = dataclasses.replace(quiet, name="again")
    drawn = [*run(draw, quiet, capfd, backend), *run(draw, again, capfd, backend)]
    assert len(drawn[0]) == {"reference": 3, "torch": 5, "tensorflow": 6}[backend]
    assert len({number for each in drawn for number in each}) == 4 * len(drawn[0])


def look_around() -> None:
    import json
    import os

    print(json.dumps([os.getcwd(), os.environ["OMP_NUM_THREADS"]]))


def test_directory_and_threads(quiet: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    for directory, threads in run(look_around, quiet, capfd):
        assert directory == os.getcwd()
        assert threads == "1"


def test_numpy_uses_all_cpus_of_a_worker(quiet: RunConfig) -> None:
    """A zygote imports it without threads, which it could not fork."""

    def multiply() -> int:
        import numpy as np

        square = np.ones((500, 500))
        np.matmul(square, square)
        return len(os.listdir("/proc/self/task"))

    one, two = (
        make_trainer(
            "reference",
            multiply,
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": cpus}),
            run_config=dataclasses.replace(quiet, name=f"{cpus} CPUs"),
        )
        .fit()
        .return_value
        for cpus in (1, 2)
    )
    assert two == one + 1


def allocate() -> None:
    import json
    import resource

    import numpy as np

    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [np.ones(1 << 17) for _ in range(40)]
        del blocks
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(json.dumps(faults))


def test_a_step_finds_the_memory_that_the_last_one_freed(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """40 MB: mapped anew, they would be ten thousand pages."""
    for first, *_, last in run(allocate, quiet, capfd):
        assert first > 5_000
        assert last < 100


def report_from_a_child() -> None:
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=_report, daemon=True)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the child exited with {process.exitcode}")


def _report() -> None:
    polytrain.report({"from": "a child"})


def test_report_from_a_child_process_is_refused(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two processes on one connection would tear each other's messages apart."""
    with pytest.raises(TrainingFailedError, match="the child exited with 1"):
        make_trainer("reference", report_from_a_child, run_config=quiet).fit()
    assert "in the training function's own process" in capfd.readouterr().err


def fork_children() -> None:
    import os
    import sys

    context = polytrain.get_context()
    ends = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            if number == 0:
                return
            if number == 1:
                raise RuntimeError("the child's own")
            sys.exit(7)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    polytrain.report({"ends": ends, "rank": context.get_world_rank()})


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_process_that_was_launched_speaks_for_its_rank(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    """A child that leaves the training function would say that its parent is done."""
    result = make_trainer(
        "reference",
        fork_children,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=quiet,
    ).fit()
    assert result.metrics == {"ends": [0, 1, 7], "rank": 0}
    assert len(result.history) == 1
    errors = capfd.readouterr().err
    assert "RuntimeError: the child's own" in errors
    assert "which rank 0 has forked, has left the training function" in errors


def stop_for_the_debugger() -> None:
    breakpoint()
    polytrain.report({"value": 1})


@pytest.mark.parametrize("set_by_ray", [False, True])
def test_a_breakpoint_in_a_worker_process_says_how_to_debug(
    quiet: RunConfig, monkeypatch: pytest.MonkeyPatch, set_by_ray: bool
) -> None:
    """Ray's debugger, which `ray.init` chooses for its driver, works in Ray's processes only."""
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    if set_by_ray:
        monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    with pytest.raises(TrainingFailedError, match=r"ScalingConfig\(num_workers=0\)"):
        make_trainer("reference", stop_for_the_debugger, run_config=quiet).fit()


def test_a_breakpoint_in_an_inline_run_opens_the_debugger(
    quiet: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr("sys.breakpointhook", lambda: calls.append("opened"))
    inline = ScalingConfig(num_workers=0)
    make_trainer("reference", stop_for_the_debugger, scaling_config=inline, run_config=quiet).fit()
    assert calls == ["opened"]


def train_unawaited(config: Any = None) -> Any:
    async def train() -> None:
        polytrain.report({"loss": 0.0})

    return train()


@pytest.mark.parametrize(("workers", "code"), [(0, None), (0, 0), (2, 0)])
def test_a_function_that_exits_without_an_error_has_returned(
    quiet: RunConfig, workers: int, code: int | None
) -> None:
    def train() -> str:
        polytrain.report({"step": 1})
        if polytrain.get_context().get_world_rank() == 0:
            sys.exit(code)
        return "to its end"

    result = make_trainer(
        "reference", train, scaling_config=ScalingConfig(num_workers=workers), run_config=quiet
    ).fit()
    assert result.finished
    assert result.metrics["step"] == 1
    assert result.return_values == ((None, "to its end") if workers else ())


@pytest.mark.parametrize(
    ("code", "words"), [(3, "exited with the code 3"), ("no data", "SystemExit: no data")]
)
def test_a_function_that_exits_with_an_error_has_failed(
    quiet: RunConfig, code: int | str, words: str
) -> None:
    def train() -> None:
        sys.exit(code)

    with pytest.raises(TrainingFailedError, match=words) as raised:
        make_trainer(
            "reference", train, scaling_config=ScalingConfig(num_workers=0), run_config=quiet
        ).fit()
    assert "in train" in str(raised.value.failures[0].traceback)


class NoOrdinaryError(BaseException):
    pass


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt("no more"), NoOrdinaryError("why"), GeneratorExit("early")]
)
def test_whatever_ends_a_function_in_a_worker_process_is_named(
    quiet: RunConfig, raised: BaseException
) -> None:
    def train() -> None:
        raise raised

    with pytest.raises(TrainingFailedError) as caught:
        make_trainer(
            "reference", train, scaling_config=ScalingConfig(num_workers=2), run_config=quiet
        ).fit()
    failure = caught.value.failures[0]
    assert failure.kind is FailureKind.USER_ERROR
    assert f"{type(raised).__name__}: {raised}" in failure.message
    assert "in train" in str(failure.traceback)
    assert "in run_worker" not in str(failure.traceback)


class Ending:
    """Ends whatever process unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("no license here",)


def test_an_object_that_ends_the_process_that_reads_it_is_named(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError) as caught:
        make_trainer(
            "reference",
            lambda config: None,
            train_loop_config={"handle": Ending()},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=quiet,
        ).fit()
    assert "SystemExit: no license here" in caught.value.failures[0].message


def test_a_coroutine_that_nobody_awaits_is_an_error(quiet: RunConfig) -> None:
    """Its signature doesn't show it, and the run would end as finished without a step."""
    trainer = make_trainer("reference", train_unawaited, run_config=quiet)
    with pytest.raises(TrainingFailedError, match=r"a coroutine, and trained nothing.*plain func"):
        trainer.fit()


@pytest.mark.parametrize("preamble", [PREAMBLE, WITH_RAY], ids=["alone", "on Ray"])
def test_arguments_of_the_command_line_are_the_drivers(tmp_path: Path, preamble: str) -> None:
    """`parse_known_args()` would otherwise give defaults, without an error."""
    script = """
        import argparse
        from polytrain import CheckpointConfig, ValidationConfig

        # As if the script had been started with them.
        sys.argv[1:] = ["--lr", "0.3", "rows.csv"]

        def write(who):
            parser = argparse.ArgumentParser()
            parser.add_argument("data", nargs="?")
            parser.add_argument("--lr", default=1.0)
            found = parser.parse_known_args()[0]
            with open("found", "a") as file:
                print(who, os.path.basename(sys.argv[0]), found.data, found.lr, file=file)

        def train():
            write("training")
            if polytrain.get_context().get_attempt() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            os.makedirs("made", exist_ok=True)
            open("made/model", "w").close()
            polytrain.report({}, checkpoint=polytrain.Checkpoint("made"), validation=True)

        def validate(checkpoint):
            write("validation")
            return {}

        if __name__ == "__main__":
            make_trainer(
                "reference",
                train,
                scaling_config=ScalingConfig(num_workers=1),
                validation_config=ValidationConfig(fn=validate),
                run_config=RunConfig(
                    storage_path="runs",
                    name="run",
                    failure_config=FailureConfig(max_failures=1),
                ),
            ).fit()
    """
    code, _, errors = run_driver(tmp_path, script, preamble=preamble)
    assert code == 0, errors
    expected = ["training", "training", "validation"]
    lines = (tmp_path / "found").read_text().splitlines()
    assert lines == [f"{who} script.py rows.csv 0.3" for who in expected]


def use_temporary_directories(config: dict[str, str]) -> None:
    """Be killed in one twice: at the third report by rank 1 itself, at the fifth by the run."""
    context = polytrain.get_context()
    for step in range(1, 10):
        with tempfile.TemporaryDirectory() as directory:
            with Path(config["used"]).open("a") as used:
                used.write(f"{directory}\n")
            Path(directory, "model").write_bytes(bytes(2**17))
            if (context.get_world_rank(), context.get_attempt(), step) == (1, 0, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            polytrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


def test_temporary_directories_of_killed_processes_are_removed(
    quiet: RunConfig, tmp_path: Path
) -> None:
    used = tmp_path / "used"
    result = make_trainer(
        "reference",
        use_temporary_directories,
        train_loop_config={"used": str(used)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(
            quiet,
            stop={"step": 5},
            failure_config=FailureConfig(max_failures=1),
            # Otherwise rank 0 may meet the condition before rank 1 begins.
            checkpoint_config=CheckpointConfig(written_by="every_rank"),
        ),
    ).fit()
    assert result.stopped is not None
    assert result.restarts == 1
    directories = {*used.read_text().split()}
    assert len(directories) > 5
    assert [each for each in directories if Path(each).exists()] == []


def leave_work_to_threads(config: dict[str, str]) -> None:
    """As a script that uploads its last model beside training, and ends."""
    import threading
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    rank = polytrain.get_context().get_world_rank()

    def upload(name: str) -> None:
        # At the end of a program, Python waits for other threads once its main thread has ended.
        if name == "thread":
            threading.main_thread().join()
        Path(config["directory"], f"{name}-{rank}").write_text("content")

    threading.Thread(target=upload, args=("thread",)).start()
    executor = ThreadPoolExecutor(1)
    began = threading.Event()
    executor.submit(began.wait)
    executor.submit(upload, "executor")
    threading.Timer(0.1, began.set).start()
    # It stays referenced, and so its thread stays.
    threading.executor = executor  # type: ignore[attr-defined]


def test_the_threads_of_a_function_end_their_work(tmp_path: Path, quiet: RunConfig) -> None:
    make_trainer(
        "reference",
        leave_work_to_threads,
        train_loop_config={"directory": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=quiet,
    ).fit()
    written = {path.name for path in tmp_path.glob("*-?")}
    assert written == {"thread-0", "thread-1", "executor-0", "executor-1"}
