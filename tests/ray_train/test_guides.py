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
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

GUIDES = Path(__file__).with_name("guides")
RECORDED: dict[str, Any] = json.loads((GUIDES / "recorded.json").read_text())
[COMMAND] = re.findall(
    r"^sed .*?> ported\.py$",
    (Path(__file__).parents[2] / "docs/ray-train.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
"""The one change that the porting page names."""

REPORT = "polytrain.workers.session.worker_api.report"
SCALING = "polytrain.config.configs.ScalingConfig"
TRAINER = "polytrain.ray_names.trainers.TorchTrainer"
PARALLEL = "polytrain.ray_names.trainers.DataParallelTrainer"

# Each form in which scripts import Ray Train: the text, what it uses, and what that is here.
FORMS = {
    "ray": ("import ray", "ray.train.report, ray.init", f"{REPORT} ray.init"),
    "ray with a comment": ("import ray  # a cluster", "ray.train.report", REPORT),
    "ray among others": ("import os, ray, sys", "ray.train.report, sys.exit", f"{REPORT} sys.exit"),
    "Ray Data": ("import ray.data", "ray.train.report, ray.data.range", f"{REPORT} ray.data.range"),
    "in a function": (
        "def made():\n    import ray\n    return ray.train.report",
        "made()",
        REPORT,
    ),
    "ray.train": ("import ray.train", "ray.train.report, ray.init", f"{REPORT} ray.init"),
    "both": ("import ray, ray.train", "ray.train.report, ray.init", f"{REPORT} ray.init"),
    "ray.train by another name": ("import ray.train as rt", "rt.report", REPORT),
    "a framework": (
        "import ray.train.torch",
        "ray.train.torch.TorchTrainer, ray.init",
        f"{TRAINER} ray.init",
    ),
    "a framework by another name": ("import ray.train.torch as rt", "rt.TorchTrainer", TRAINER),
    "train": (
        "from ray import train",
        "train.report, train.torch.TorchTrainer",
        f"{REPORT} {TRAINER}",
    ),
    "train by another name": ("from ray import train as rt", "rt.report", REPORT),
    "train and tune": (
        "from ray import train, tune",
        "train.report, tune.Tuner",
        f"{REPORT} ray.tune.Tuner",
    ),
    "tune and train": (
        "from ray import data, train, tune",
        "train.report, tune.Tuner, data.range",
        f"{REPORT} ray.tune.Tuner ray.data.range",
    ),
    "names of ray.train": (
        "from ray.train import ScalingConfig, report",
        "ScalingConfig, report",
        f"{SCALING} {REPORT}",
    ),
    "over lines": (
        "from ray.train import (\n    ScalingConfig,\n    report,\n)",
        "ScalingConfig, report",
        f"{SCALING} {REPORT}",
    ),
    "v2": ("from ray.train.v2.api.config import ScalingConfig", "ScalingConfig", SCALING),
    "a trainer of v2": (
        "from ray.train.v2.torch.torch_trainer import TorchTrainer",
        "TorchTrainer",
        TRAINER,
    ),
    "the trainer of v2": (
        "from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer",
        "DataParallelTrainer",
        PARALLEL,
    ),
    "a module of a framework": (
        "from ray.train.torch.config import TorchConfig\n"
        "from ray.train.tensorflow.keras import ReportCheckpointCallback as callback",
        "TorchConfig",
        "polytrain.ray_names.trainers.TorchConfig",
    ),
    "air": ("from ray import air", "air.ScalingConfig", SCALING),
    "air and session": (
        "from ray.air import session\nfrom ray.air.config import ScalingConfig",
        "session.report, ScalingConfig",
        f"{REPORT} {SCALING}",
    ),
    "air by its path": (
        "import ray.air",
        "ray.air.session.report, ray.air.config.ScalingConfig",
        f"{REPORT} {SCALING}",
    ),
    "data_parallel_trainer": (
        "from ray.train.data_parallel_trainer import DataParallelTrainer",
        "DataParallelTrainer",
        PARALLEL,
    ),
    "collectives": (
        "from ray.train.collective.collectives import barrier",
        "barrier",
        "polytrain.collective.barrier",
    ),
    "transformers": (
        "from ray.train.huggingface.transformers import prepare_trainer",
        "prepare_trainer",
        "polytrain_torch.transformers.prepare_trainer",
    ),
}

# What polytrain doesn't have is named where it is imported, with what to use instead.
ABSENT = {
    "from ray.train.torch import TorchCheckpoint": "ray.train.torch.TorchCheckpoint",
    "from ray.train.torch.torch_checkpoint import TorchCheckpoint": "TorchCheckpoint",
    "from ray.train.base_trainer import BaseTrainer": "BaseTrainer",
    "from ray.train.horovod import HorovodTrainer": "HorovodTrainer",
    "from ray.train.v2.jax import JaxTrainer": "JaxTrainer",
    "from ray.train.backend import Backend, BackendConfig": "Backend",
    "from ray.train.error import SessionMisuseError": "SessionMisuseError",
    "from ray.air.integrations.wandb import setup_wandb": "setup_wandb",
    "from ray.air.integrations.mlflow import setup_mlflow": "setup_mlflow",
    "from ray.air import ScalingConfig, session": "session",
    "from ray.air import session\nsession.get_world_rank()": "get_world_rank",
    "from ray.train.batch_predictor import BatchPredictor": "BatchPredictor",
}

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
    # `test_collectives`, `test_checkpoints` and torch's own tests call the same in runs.
    "batch_norm_training",
    "collectives",
    "upload_modes",
    # As does `test_validation`.
    "validation",
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
    shutil.copy(GUIDES / f"{name}.py", tmp_path / "train.py")
    ported(tmp_path)
    assert printed(tmp_path / "ported.py", tmp_path) == approximately(RECORDED[name])


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_an_import_is_ported(form: str, tmp_path: Path) -> None:
    text, used, expected = FORMS[form]
    (tmp_path / "train.py").write_text(f"{text}\nused = [{used}]\n")
    names: dict[str, Any] = {}
    exec(ported(tmp_path), names)
    resolved = [_resolved(each) for each in expected.split()]
    assert all(one is other for one, other in zip(names["used"], resolved, strict=True))


@pytest.mark.parametrize("text", ABSENT)
def test_what_has_no_counterpart_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{text}\n")
    with pytest.raises(
        (ImportError, AttributeError), match=rf"no counterpart of .*{ABSENT[text]}: "
    ):
        exec(ported(tmp_path), {})


def ported(directory: Path) -> str:
    """Port `train.py` as the page says; return the text."""
    subprocess.run(COMMAND, shell=True, cwd=directory, check=True)
    return (directory / "ported.py").read_text()


def _resolved(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


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
