"""The code passes what `make lint` checks: style, import contracts, types, workflows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = (ROOT / ".ci/checks").read_text().splitlines()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("check", CHECKS)
def test_it_finds_nothing(check: str) -> None:
    program, *arguments = check.split()
    command = [Path(sys.executable).with_name(program), *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
