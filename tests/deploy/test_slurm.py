"""The script for Slurm, with stand-ins for Slurm's commands, and for polytrain's."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polytrain.view.cli.job_file import job_of

DEPLOY = Path(__file__).parents[2] / "examples/deploy"
SCRIPT = DEPLOY / "slurm/polytrain.sbatch"
JOB = job_of((DEPLOY / "job.toml").read_text())

SRUN = """
printf '%q ' "$@" > srun.arguments
env > srun.environment
echo > started
exit "$(cat end)"
"""
POLYTRAIN = """
echo "$@" >> polytrain.calls
case $1 in
    stop)
        [ -z "$NOT_ACTIVE" ] || exit 1
        echo 75 > end
        exit 75 ;;
    show) exit $SHOWN ;;
esac
"""
SCONTROL = 'echo "$@" >> scontrol.calls'


class Job:
    """The script, running as a job of Slurm's would. `started` and `end` are pipes of srun's."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.directory = directory
        commands = {"srun": SRUN, "polytrain": POLYTRAIN, "scontrol": SCONTROL}
        for name, text in commands.items():
            command = directory / "bin" / name
            command.parent.mkdir(exist_ok=True)
            command.write_text(f"#!/bin/bash\n{text}")
            command.chmod(0o755)
        for pipe in ("started", "end"):
            os.mkfifo(directory / pipe)
        of_slurm = {
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "2",
            "SHOWN": "0",
            "NOT_ACTIVE": "",
        }
        path = f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            ["bash", SCRIPT],
            cwd=directory,
            env={"PATH": path, "HOME": str(directory), **of_slurm, **environment},
            stdout=subprocess.DEVNULL,
        )
        (directory / "started").read_text()

    def end(self, code: int) -> int:
        """The step ends with a code. Returns that of the job."""
        (self.directory / "end").write_text(f"{code}\n")
        return self.process.wait(timeout=60)

    def said(self, name: str) -> str:
        path = self.directory / name
        return path.read_text() if path.exists() else ""


def test_a_run_that_finishes_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.end(0) == 0
    assert job.said("polytrain.calls") == f"show {tmp_path}/runs/first-run\n"
    assert not job.said("scontrol.calls")


@pytest.mark.parametrize("code", [1, 75])
def test_a_run_that_fails_or_that_somebody_stops_is_not_queued_again(
    tmp_path: Path, code: int
) -> None:
    job = Job(tmp_path)
    assert job.end(code) == code
    assert not job.said("scontrol.calls")


def test_a_ray_that_did_not_start_is_not_taken_for_a_finished_run(tmp_path: Path) -> None:
    # `ray symmetric-run` ends with 0 then, and there is no such run: `polytrain show` says 3.
    assert Job(tmp_path, SHOWN="3").end(0) == 3


def test_before_slurm_takes_the_nodes_the_run_stops_and_is_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=60) == 75
    assert job.said("polytrain.calls") == (
        f"stop {tmp_path}/runs/first-run --reason Slurm ends job 123456\n"
    )
    assert job.said("scontrol.calls") == "requeue 123456\n"


def test_a_job_whose_run_has_not_started_is_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, NOT_ACTIVE="yes")
    job.process.send_signal(signal.SIGTERM)
    # Slurm ends the step.
    assert job.end(143) == 143
    assert job.said("scontrol.calls") == "requeue 123456\n"


def test_ray_takes_the_arguments_and_polytrain_the_jobs_command(tmp_path: Path) -> None:
    from ray.scripts.symmetric_run import curate_and_validate_ray_start_args, symmetric_run

    job = Job(tmp_path, STORAGE="s3://bucket/runs")
    job.end(0)
    words = shlex.split(job.said("srun.arguments"))
    of_srun, of_ray = words[: words.index("ray")], words[words.index("ray") + 1 :]
    assert of_srun == ["--cpus-per-task=2"]
    assert of_ray.pop(0) == "symmetric-run"
    of_ray, command = of_ray[: of_ray.index("--")], of_ray[of_ray.index("--") + 1 :]

    parsed = symmetric_run.make_context("_", list(of_ray), resilient_parsing=True).params
    assert parsed["min_nodes"] == 2
    assert curate_and_validate_ray_start_args(of_ray) == ["--num-cpus", "2"]

    assert command[:4] == ["env", f"RAY_ADDRESS={parsed['address']}", "polytrain", "run"]
    assert command[4] == "job.toml"
    changed = job_of((DEPLOY / "job.toml").read_text(), command[6::2])
    assert changed["run_config"]["storage_path"] == "s3://bucket/runs"
    assert changed["scaling_config"]["num_workers"] == 2

    environment = dict(line.partition("=")[::2] for line in job.said("srun.environment").split())
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64


def test_the_job_reserves_what_the_run_asks_for() -> None:
    text = SCRIPT.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, flags=re.MULTILINE))
    scaling = JOB["scaling_config"]
    assert int(options["cpus-per-task"]) == scaling["resources_per_worker"]["CPU"]
    assert int(options["nodes"]) == scaling["num_workers"]
    assert f"RUN=$STORAGE/{JOB['run_config']['name']} " in text
