"""Scripts as Ray Train's user guides teach them: with `ray.train` renamed, the result is the same.

`guides/` has the scripts as they are written for Ray Train. `recorded.json` has what each of them
printed with Ray Train 2.60; `make sweep` runs Ray Train itself once more.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GUIDES = Path(__file__).with_name("guides")
RECORDED: dict[str, Any] = json.loads((GUIDES / "recorded.json").read_text())
COMMAND = re.findall(
    "^sed .*$", (Path(__file__).parents[2] / "docs/ray-train.md").read_text(), re.MULTILINE
)
"""The one change that the porting page names."""

IN_SWEEP = {
    # They read a data set of Ray Data, so ours run on Ray, too.
    "lightgbm_training",
    "text_classification",
    "torch_ray_data",
    "validation_datasets",
    "xgboost_resume",
    "xgboost_training",
    # Other tests run these libraries with the same names.
    "accelerate_training",
    "deepspeed_training",
    "image_classification",
    "keras_training",
    "lightning_training",
    "tensorflow_training",
    "transformers_training",
}


def printed(script: Path, directory: Path) -> Any:
    """What a script prints at its end, run in a directory."""
    run = subprocess.run(
        [sys.executable, script], cwd=directory, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    [line] = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.only_in_sweep] if name in IN_SWEEP else [])
        for name in sorted(RECORDED)
    ],
)
def test_a_ported_script_gives_what_ray_train_gives(name: str, tmp_path: Path) -> None:
    [command] = COMMAND
    shutil.copy(GUIDES / f"{name}.py", tmp_path / "train.py")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert printed(tmp_path / "ported.py", tmp_path) == approximately(RECORDED[name])


@pytest.mark.only_in_sweep
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_ray_train_still_gives_what_was_recorded(name: str, tmp_path: Path) -> None:
    assert printed(GUIDES / f"{name}.py", tmp_path) == approximately(RECORDED[name])


def test_every_guide_is_recorded() -> None:
    assert {path.stem for path in GUIDES.glob("*.py")} == RECORDED.keys()


def approximately(value: Any) -> Any:
    """With room for the order in which sums are taken."""
    if isinstance(value, dict):
        return {name: approximately(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [approximately(inner) for inner in value]
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
