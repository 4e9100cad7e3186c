"""The Dockerfile, as far as it can be checked where nothing can be built, and what runs in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
TEXT = DOCKERFILE.read_text().replace("\\\n", " ")


def test_a_linter_has_nothing_to_say_about_it() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    run = subprocess.run(
        [hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_what_it_copies_is_there() -> None:
    copied = re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", TEXT, flags=re.MULTILINE)
    sources = [source for line in copied for source in line.split()]
    assert {"examples/deploy/job.toml", "examples/deploy/train.py"} <= set(sources)
    assert [each for each in sources if not (ROOT / each).exists()] == []


def test_its_python_is_the_one_whose_versions_it_installs_and_its_user_is_not_root() -> None:
    python = re.search(r"^FROM python:(\d+)\.(\d+)\.", TEXT, flags=re.MULTILINE)
    assert python
    pins = f".ci/constraints-py{python[1]}{python[2]}.txt"
    assert (ROOT / pins).is_file()
    assert TEXT.count(f"-c {pins}") == TEXT.count("pip install")
    assert re.findall(r"^USER (.+)$", TEXT, flags=re.MULTILINE) == ["1000"]


@pytest.mark.parametrize("refused", [False, True])
def test_a_pod_that_is_stopped_tells_ray(tmp_path: Path, refused: bool) -> None:
    ray = tmp_path / "ray"
    ray.write_text(f'#!/bin/sh\necho "$@"\nexit {int(refused)}\n')
    ray.chmod(0o755)
    run = subprocess.run(
        [DEPLOY / "leave-node"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "LEAVE_WITHIN_S": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    command = "drain-node --reason DRAIN_NODE_REASON_PREEMPTION"
    assert run.stdout.startswith(command)
    assert "--deadline-remaining-seconds 1\n" in run.stdout
    # Other tests' ranks may be on this machine. It has waited for them for as long as it may.
    assert run.returncode in ((1,) if refused else (0, 124))


def test_ray_has_the_command_that_tells_it() -> None:
    """It is one for developers, which Ray doesn't promise to keep."""
    shown = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    call = (DEPLOY / "leave-node").read_text().partition("ray drain-node")[2].partition("||")[0]
    options = set(re.findall(r"--[a-z-]+", call))
    assert options == {"--reason", "--reason-message", "--deadline-remaining-seconds"}
    assert options <= set(re.findall(r"--[a-z-]+", shown))
    assert "DRAIN_NODE_REASON_PREEMPTION" in shown
    assert "Will default to current node" in " ".join(shown.split())
