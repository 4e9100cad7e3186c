"""What `polytrain new-backend` writes is installed by pip, and passes the kit as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new backend's distribution; `site` beside it is where it is installed."""
    directory = tmp_path_factory.mktemp("new")
    python = [sys.executable, "-m"]
    subprocess.run(
        [*python, "polytrain", "new-backend", "river_net"], cwd=directory, check=True, timeout=60
    )
    install = [*python, "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    site = directory / "site"
    subprocess.run([*install, f"--target={site}", directory / "river_net"], check=True, timeout=120)
    return directory / "river_net"


@pytest.mark.parametrize("tests", ["not chaos", only_in_sweep("chaos")])
def test_a_new_backend_passes_the_kit(written: Path, tests: str) -> None:
    search = [str(written.with_name("site")), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", tests],
        cwd=written,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout
