"""Workers on one machine, without Ray."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.e2e.driver import run_driver, start_driver

import polytrain
from polytrain import (
    InvalidJobError,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.testing.processes import eventually


def report_size() -> None:
    polytrain.report({"world_size": polytrain.get_context().get_world_size()})


def test_a_script_needs_no_ray(tmp_path: Path) -> None:
    """Neither the driver nor a worker process has imported it, and nothing is left."""
    script = """
    import psutil
    from polytrain.workers.processes.cache import let_go

    def train():
        polytrain.report({"ray": "ray" in sys.modules})

    result = make_trainer(
        "reference", train, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path="runs"),
    ).fit()
    print(result.metrics, "ray" in sys.modules)
    let_go()
    print("left", psutil.Process().children(recursive=True))
    """
    code, output, errors = run_driver(tmp_path, script)
    assert code == 0, errors
    assert output == "{'ray': False} False\nleft []\n"
    first = "run: starting (2 workers on this machine: nothing needs a cluster)"
    assert errors.startswith(first), errors


def test_as_many_workers_start_as_the_machine_holds(quiet: RunConfig) -> None:
    cpus = os.environ["POLYTRAIN_LOCAL_CPUS"]
    result = make_trainer(
        "reference",
        report_size,
        scaling_config=ScalingConfig(num_workers=(2, 64)),
        run_config=quiet,
    ).fit()
    assert result.metrics["world_size"] == int(cpus)


def own_gpus() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_worker_has_gpus_of_its_own(quiet: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("linux.machine_resources", "workers.driver.local_cluster"):
        monkeypatch.setattr(
            f"polytrain.{module}.visible_gpus", lambda environment: ("3", "GPU-1", "0", "5")
        )
    result = make_trainer(
        "reference",
        own_gpus,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"GPU": 2}),
        run_config=quiet,
    ).fit()
    assert result.return_values == ("3,GPU-1", "0,5")


def test_more_workers_than_the_machine_holds(quiet: RunConfig) -> None:
    with pytest.raises(InvalidJobError) as caught:
        make_trainer(
            "reference",
            report_size,
            scaling_config=ScalingConfig(num_workers=5),
            run_config=quiet,
        )
    [problem] = caught.value.problems
    assert problem.field == "ScalingConfig.num_workers"
    assert problem.what == "5 workers are more than this machine can hold (4 CPU)"
    assert problem.remedy.startswith("Use num_workers=4")


def test_a_worker_that_cannot_be_prepared_ends_the_run(
    quiet: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What goes wrong before any worker process exists has a reason all the same."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(file))
    with pytest.raises(TrainingFailedError, match=r"the last: NotADirectoryError"):
        make_trainer(
            "reference",
            report_size,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=dataclasses.replace(quiet, storage_path=tmp_path / "runs"),
        ).fit()


def test_a_child_of_a_killed_driver_keeps_nothing_of_its_run(tmp_path: Path) -> None:
    """A loader of the user's own outlives the driver. A resumed run must be alone."""
    script = """
    import multiprocessing
    from pathlib import Path
    from polytrain.testing.processes import eventually

    def train():
        polytrain.report({"trains": 1})
        Path("worker.new").write_text(str(os.getpid()))
        Path("worker.new").rename("worker")
        signal.pause()

    make_trainer(
        "reference", train, scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path="runs", progress=False),
    ).fit(wait=False)
    assert eventually(Path("worker").exists, seconds=60)
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    print(child.pid, Path("worker").read_text(), flush=True)
    signal.pause()
    """
    driver = start_driver(tmp_path, script)
    child = 0
    try:
        assert driver.stdout is not None
        child, worker = map(int, driver.stdout.readline().split())
        driver.kill()
        assert eventually(lambda: not psutil.pid_exists(worker))
        assert psutil.pid_exists(child)
    finally:
        driver.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        driver.communicate()
