"""Training functions from everywhere that a user may define one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.e2e.driver import PREAMBLE, run_driver
from tests.sweeps import only_in_sweep

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


READ_THEIR_SOURCE = {
    "torch": """
    def train():
        import torch

        def one_more(values: torch.Tensor) -> torch.Tensor:
            if bool(values.sum() > 0):
                return values + 1
            return values

        compiled = torch.jit.script(one_more)
        polytrain.report({"answer": int(compiled(torch.tensor([45])))})
    """,
    "tensorflow": """
    def train():
        import tensorflow as tf

        @tf.function
        def one_more(values):
            if tf.reduce_sum(values) > 0:
                values += 1
            return values

        polytrain.report({"answer": int(one_more(tf.constant([45]))[0])})
    """,
}
"""Training functions of a script with parts that a framework compiles from their text."""


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["torch", only_in_sweep("tensorflow")])
def test_frameworks_that_compile_a_function_find_its_source(tmp_path: Path, backend: str) -> None:
    script = textwrap.dedent(READ_THEIR_SOURCE[backend]) + FIT.format(function="train")
    code, output, errors = run_driver(tmp_path, script.replace('"reference"', f'"{backend}"'))
    assert code == 0, errors
    assert "answer 46" in output


def test_notebook_cell(tmp_path: Path) -> None:
    """A real kernel runs the cells; an error shows the line of the cell."""
    cells = [
        PREAMBLE,
        "def train():\n    polytrain.report({'answer': 45})",
        FIT.format(function="train"),
        "def wrong():\n    polytrain.report({'answer': 45 / 0})",
        "try:" + textwrap.indent(FIT.format(function="wrong"), "    ") + "except polytrain."
        "TrainingFailedError as error:\n    print(error.failures[0].traceback)",
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
    cells_after = path.read_text()
    assert "answer 45" in cells_after
    assert "line 2, in wrong\\n" in cells_after
    assert "    polytrain.report({'answer': 45 / 0})\\n" in cells_after
