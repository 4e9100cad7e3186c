"""Libraries on top of torch that aren't installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

LIBRARIES = ["lightning", "transformers", "accelerate", "deepspeed", "keras"]

WITHOUT_THEM = f"""
import importlib, sys

for library in {LIBRARIES!r}:
    sys.modules[library] = None
import polytrain_torch

for library in {LIBRARIES!r}:
    try:
        importlib.import_module(f"polytrain_torch.{{library}}")
    except ModuleNotFoundError as error:
        print(error)
"""


def test_each_is_reported_with_its_command_and_the_plugin_needs_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THEM], capture_output=True, text=True, check=True
    )
    requirements = {"lightning": "'lightning>=2.6.6'"}
    assert done.stdout.splitlines() == [
        f"polytrain_torch.{library} needs {library}, which isn't installed: "
        f"pip install {requirements.get(library, library)}"
        for library in LIBRARIES
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("module", [only_in_sweep("lightning"), "lightning.parts"])
def test_an_unsafe_lightning_is_refused_before_its_code_runs(tmp_path: Path, module: str) -> None:
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("print('its code has run')")
    installed = tmp_path / "lightning-2.6.5.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: lightning\nVersion: 2.6.5\n")
    done = subprocess.run(
        [sys.executable, "-c", f"import polytrain_torch.{module}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.stdout == ""
    assert "lightning 2.6.5 is installed" in done.stderr
    assert "in spite of weights_only" in done.stderr
    assert "pip install 'lightning>=2.6.6'" in done.stderr
