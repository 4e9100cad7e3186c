"""Training functions from everywhere that a user may define one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.e2e.driver import PREAMBLE, run_driver

FIT = """
result = make_trainer(
    "reference", {function},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path="runs", progress=False),
).fit()
print("answer", result.metrics["answer"])
"""


def test_script(tmp_path: Path) -> None:
    script = """
    offset = 2

    def train():
        polytrain.report({"answer": 40 + offset})
    """
    code, output, errors = run_driver(
        tmp_path, textwrap.dedent(script) + FIT.format(function="train")
    )
    assert code == 0, errors
    assert "answer 42" in output


def test_module_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import polytrain\ndef train():\n    polytrain.report({'answer': 43})\n"
    )
    script = "import beside\n" + FIT.format(function="beside.train")
    code, output, errors = run_driver(tmp_path, script)
    assert code == 0, errors
    assert "answer 43" in output


def test_interactive_prompt(tmp_path: Path) -> None:
    """As typed: standard input, no file, the working directory on the path as ''."""
    (tmp_path / "beside.py").write_text("ANSWER = 44\n")
    typed = PREAMBLE + textwrap.dedent(
        """
        def train():
            import beside
            polytrain.report({"answer": beside.ANSWER})

        """
    )
    fit = FIT.format(function="train").replace("\n    ", " ").replace("\n)", ")")
    run = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=typed + fit,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "answer 44" in run.stdout, run.stderr


def test_notebook_cell(tmp_path: Path) -> None:
    """A real kernel runs the cells."""
    cells = [
        PREAMBLE,
        "def train():\n    polytrain.report({'answer': 45})",
        FIT.format(function="train"),
    ]
    notebook = {
        "cells": [
            {
                "cell_type": "code",
                "execution_count": None,
                "id": f"cell-{index}",
                "metadata": {},
                "outputs": [],
                "source": source,
            }
            for index, source in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = tmp_path / "notebook.ipynb"
    path.write_text(json.dumps(notebook))
    run = subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    assert "answer 45" in path.read_text()
