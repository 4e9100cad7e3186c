"""Scripts that fork from a process that `python -m polytrain warm` keeps."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.e2e.driver import run_driver, start_driver

SCRIPT = """
def train():
    polytrain.report({"parent": os.getppid()})

result = make_trainer(
    "reference", train, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path="runs", progress=False),
).fit()
print(result.metrics["parent"])
"""


@pytest.fixture(autouse=True)
def _none_is_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MARK", secrets.token_hex(8))
    yield
    command(tmp_path, "--stop")


def command(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "polytrain", "warm", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )


def parent_of_workers(directory: Path) -> int:
    code, output, errors = run_driver(directory, SCRIPT)
    assert code == 0, errors
    return int(output)


def test_scripts_fork_from_it_until_it_is_stopped(tmp_path: Path) -> None:
    warm = command(tmp_path, "reference", "--minutes", "5")
    assert warm.returncode == 0, warm.stderr
    pid = int(re.match(r"process (\d+): ", warm.stdout)[1])  # type: ignore[index]
    both = [start_driver(tmp_path, SCRIPT, name=f"{name}.py") for name in ("one", "two")]
    for driver in both:
        output, errors = driver.communicate(timeout=120)
        assert driver.returncode == 0, errors
        assert int(output) == pid
    shown = command(tmp_path, "--status").stdout
    assert re.search(rf"process {pid}: numpy, pandas; \d+ MB; ends in [45]\.\d minutes", shown)
    assert f"process {pid}: ended" in command(tmp_path, "--stop").stdout
    # The system's first process may reap it later.
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert parent_of_workers(tmp_path) != pid


def test_runs_leave_theirs_if_the_variable_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYTRAIN_WARM", "5")
    pid = parent_of_workers(tmp_path)
    assert parent_of_workers(tmp_path) == pid
    # Imports depend on the environment.
    monkeypatch.setenv("COLOUR", "red")
    assert parent_of_workers(tmp_path) != pid


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["troch"], "'troch' is neither a backend"),
        (["reference", "--minutes", "0"], "isn't a number of minutes above 0"),
        (["reference", "--stop"], "--stop and --status take no names"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = command(tmp_path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
