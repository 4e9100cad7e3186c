"""Runs a driver in a process of its own, as a user's script is."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

PREAMBLE = """
import os, signal, sys, time
import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer
"""

WITH_RAY = f"""{PREAMBLE}
import ray
ray.init(
    address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=40
)
"""


def start_driver(
    directory: Path, script: str, *, preamble: str = PREAMBLE, name: str = "script.py"
) -> subprocess.Popen[str]:
    """Start a script that begins with a preamble; its directory is the working directory."""
    path = directory / name
    path.write_text(preamble + textwrap.dedent(script))
    return subprocess.Popen(
        [sys.executable, "-u", path],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_driver(
    directory: Path, script: str, *, preamble: str = PREAMBLE, seconds: float = 120
) -> tuple[int, str, str]:
    """Run such a script to its end; return its exit code and what it wrote."""
    process = start_driver(directory, script, preamble=preamble)
    output, errors = process.communicate(timeout=seconds)
    return process.returncode, output, errors
