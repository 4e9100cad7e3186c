"""The job that all of it starts: its command may be repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "examples/deploy"


def test_the_command_trains_and_when_repeated_does_nothing(tmp_path: Path) -> None:
    """Whole runs: a job whose training function nothing calls would be broken sooner or later."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "polytrain", *command],
            cwd=DEPLOY,
            env={**os.environ, "POLYTRAIN_LOCAL_CPUS": "4", "RAY_ADDRESS": "local"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    settings = [
        *("--set", f"run_config.storage_path={tmp_path}"),
        *("--set", "scaling_config.num_workers=2"),
        *("--set", "scaling_config.use_gpu=false"),
        *("--set", "train_loop_config.epochs=2"),
    ]
    trained = run("run", "job.toml", *settings)
    assert trained.returncode == 0, trained.stderr
    again = run("run", "job.toml", *settings)
    assert again.returncode == 0, again.stderr
    shown = json.loads(run("show", str(tmp_path / "first-run"), "--json").stdout)
    assert shown["data"]["state"] == "finished"
    assert len(shown["data"]["attempts"]) == 1
