"""What is imported where: a driver holds no framework and no Ray, a trainer's process no Ray."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import polytrain

FRAMEWORKS = ("torch", "xgboost", "lightgbm", "tensorflow", "keras", "sklearn")

DRIVER = """
import sys
import polytrain
from polytrain_plugins import DatasetInfo, Job, load_backend

assert len(polytrain.backend_names()) >= 5, polytrain.backend_names()
info = DatasetInfo(name="train", columns=("x", "label"), num_rows=9)
for name in polytrain.backend_names():
    for has_function in (True, False):
        backend = load_backend(name)()
        job = Job(
            num_workers=2,
            use_gpu=False,
            cpus_per_worker=1,
            has_training_function=has_function,
            datasets={"train": info},
        )
        list(backend.problems(job))
        backend.demand(job)
"""

INLINE = """
import sys, tempfile
import polytrain
result = polytrain.make_trainer(
    "reference",
    label="y",
    datasets={"train": {"x": [1.0, 2.0], "y": [1.0, 2.0]}},
    scaling_config=polytrain.ScalingConfig(num_workers=0),
    run_config=polytrain.RunConfig(storage_path=tempfile.mkdtemp(), progress=False),
).fit()
assert result.load_model().shape == (2,)
"""

LOCAL_RUN = """
import sys, tempfile
from dataclasses import dataclass
import polytrain
from polytrain_plugins import Backend, Capabilities

@dataclass(frozen=True, kw_only=True)
class Unimported(Backend):
    name = "unimported"
    contract_version = 1
    capabilities = Capabilities()

    def engine(self):
        from polytrain.backends.reference import Reference, ReferenceEngine

        return ReferenceEngine(Reference())

def train():
    polytrain.report({"loss": 1.0})

result = polytrain.Trainer(
    Unimported(),
    train,
    scaling_config=polytrain.ScalingConfig(num_workers=2, cluster="local"),
    run_config=polytrain.RunConfig(storage_path=tempfile.mkdtemp()),
).fit()
assert result.metrics == {"loss": 1.0}
"""
TORCH = """
import sys, tempfile
import polytrain
polytrain.make_trainer(
    "torch", print, run_config=polytrain.RunConfig(storage_path=tempfile.mkdtemp())
)
"""
NOT_NEEDED = (
    "IPython",
    "fsspec",
    "html.parser",
    "jinja2",
    "numpy",
    "pandas",
    "polytrain.view.cli",
    "polytrain.data.checks",
    "polytrain.data.plan",
    "polytrain.data.read",
    "polytrain.view.doctor",
    "polytrain.view.page.rendering",
    "polytrain.prediction",
    "polytrain.storage.remote",
    "polytrain.testing",
    "polytrain.trackers.mlflow",
    "polytrain.trackers.tensorboard",
    "psutil",
    "pyarrow",
    "rich",
)
"""What takes long to import, and is of no use to a driver whose training function has no data."""


def loaded(script: str, *unwanted: str) -> list[str]:
    """Which of the unwanted modules a script has loaded by its end."""
    script += f"\nprint('LOADED', *sorted({set(unwanted)!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [line] = [line for line in run.stdout.splitlines() if line.startswith("LOADED")]
    return line.split()[1:]


def test_a_driver_loads_neither_ray_nor_a_framework() -> None:
    assert loaded(DRIVER, "ray", *FRAMEWORKS) == []


def test_the_contract_loads_no_core() -> None:
    heavy = ("polytrain", "ray", "numpy", "pyarrow", "pandas", *FRAMEWORKS)
    assert loaded("import sys, polytrain_plugins", *heavy) == []


@pytest.mark.parametrize(
    "module", ["processes.zygote", "session.worker_process", "session.session"]
)
def test_a_trainers_process_starts_without_ray(module: str) -> None:
    script = f"import sys, polytrain.workers.{module}"
    assert loaded(script, "ray", "pandas", *FRAMEWORKS) == []


@pytest.mark.parametrize("script", [LOCAL_RUN, TORCH])
def test_a_driver_without_data_loads_only_what_it_needs(script: str) -> None:
    assert loaded(script, "ray", *FRAMEWORKS, *NOT_NEEDED) == []


def test_an_inline_run_does_without_ray() -> None:
    assert loaded(INLINE, "ray", *FRAMEWORKS) == []


def test_no_subpackage_bears_a_public_name() -> None:
    """Importing it would put the module in the place of the function: `polytrain.report`."""
    modules = {module.name for module in pkgutil.iter_modules(polytrain.__path__)}
    assert {"api", "workers"} <= modules
    assert modules & set(polytrain.__all__) == set()
