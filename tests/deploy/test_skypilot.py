"""The task for SkyPilot: valid, and with what the job asks for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from polytrain.view.cli.job_file import job_of

DEPLOY = Path(__file__).parents[2] / "examples/deploy"
SCHEMAS = Path(__file__).parent / "schemas"
TASK: dict[str, Any] = yaml.safe_load((DEPLOY / "skypilot/task.yaml").read_text())
JOB = job_of((DEPLOY / "job.toml").read_text())


def test_it_is_valid() -> None:
    for value, name in ((TASK, "task"), (TASK["resources"], "resources")):
        schema = json.loads((SCHEMAS / f"skypilot-0.14.1-{name}.json").read_text())
        jsonschema.validate(value, schema)
    for commands in (TASK["setup"], TASK["run"]):
        subprocess.run(["bash", "-n"], input=commands, text=True, check=True)


def test_it_asks_for_what_the_job_asks_for() -> None:
    scaling = JOB["scaling_config"]
    assert TASK["num_nodes"] == int(TASK["envs"]["WORKERS"]) == scaling["num_workers"]
    assert TASK["resources"]["cpus"] == f"{scaling['resources_per_worker']['CPU']}+"
    assert TASK["resources"]["use_spot"] is True


def test_what_is_lost_with_the_machines_and_what_is_secret_is_asked_for() -> None:
    # SkyPilot refuses to start a task with null.
    assert TASK["envs"]["STORAGE"] is None
    assert set(TASK["secrets"].values()) == {None}
