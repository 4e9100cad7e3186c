"""Libraries on top of torch that aren't installed."""

from __future__ import annotations

import subprocess
import sys

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


def test_each_is_told_with_its_command_and_the_plugin_needs_none() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THEM], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"polytrain_torch.{library} needs {library}, which isn't installed: pip install {library}"
        for library in LIBRARIES
    ]
