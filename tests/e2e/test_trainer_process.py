"""What a training function finds around it: its process, and Ray."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

import polytrain
from polytrain import RunConfig, ScalingConfig, TrainingFailedError, make_trainer


def run(function: Any, quiet: RunConfig, capfd: pytest.CaptureFixture[str]) -> list[Any]:
    """What each rank has printed as JSON, in rank order."""
    make_trainer(
        "reference", function, scaling_config=ScalingConfig(num_workers=2), run_config=quiet
    ).fit()
    lines = capfd.readouterr().out.splitlines()
    told = {line[: len("(rank 0)")]: json.loads(line[len("(rank 0) ") :]) for line in lines}
    return [told["(rank 0)"], told["(rank 1)"]]


def draw() -> None:
    import json
    import random

    import numpy as np

    print(json.dumps([random.random(), np.random.default_rng().random(), np.random.random()]))


def test_ranks_draw_different_random_numbers(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """All are forks of one process, whose generators they would go on with."""
    first, second = run(draw, quiet, capfd)
    assert not set(first) & set(second)


def look_around() -> None:
    import json
    import os

    print(json.dumps([os.getcwd(), os.environ["OMP_NUM_THREADS"]]))


def test_directory_and_threads(quiet: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    for directory, threads in run(look_around, quiet, capfd):
        assert directory == os.getcwd()
        assert threads == "1"


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


def ask_ray() -> None:
    import json

    import ray

    ray.init(log_to_driver=False, logging_level=40)
    print(json.dumps(ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote())))


@pytest.mark.on_ray
def test_ray_is_reachable(quiet: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    """The same cluster, with whatever CPUs the workers leave."""
    assert run(ask_ray, quiet, capfd) == [42, 42]


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
