"""The kernel does without each satellite: its tests are green in a copy that lacks the folders."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import satellites

ROOT = Path(__file__).parents[2]
DOORS = ("torch", "xgboost", "lightgbm", "tensorflow", "lightning", "huggingface")
SATELLITES = ("view", "trackers", "prediction", "validation", "ray_names", "doors")
KERNELS_TESTS = (
    "tests/unit/run/test_background_tasks.py",
    "tests/unit/run/test_conditions.py",
    "tests/unit/run/test_controller.py",
    "tests/unit/checkpoint/test_manager.py",
    "tests/unit/record/test_journal.py",
    "tests/unit/policy/test_failure_policy.py",
)

ROOMS = (
    "api.backend_checks",
    "api.trainer",
    "checkpoint",
    "config",
    "data_errors",
    "errors",
    "events",
    "functions",
    "lazy_names",
    "linux",
    "observe.stacks",
    "output",
    "ray_api",
    "record",
    "run.identity",
    "run.lease",
    "run.requests",
    "run.run",
    "storage",
    "text",
)
"""What of the kernel any satellite may use, besides public names and `polytrain.extension`."""

OWN_ROOMS = {
    "prediction": ("api.cluster_checks", "data", "policy.scaling", "workers"),
    "validation": ("policy.validation", "run.attached_work", "workers"),
    "view": (
        "policy.links",
        "policy.placement",
        # The kit, for a backend that `polytrain new-backend` writes.
        "testing",
        "workers",
    ),
}
"""What one of them needs besides, because it starts processes or looks at nodes."""

RUN = """
import os, signal, sys, tempfile
from pathlib import Path
import polytrain
from polytrain import Checkpoint, RunConfig, ScalingConfig, make_trainer

directory = Path(tempfile.mkdtemp())
assert polytrain.__file__.startswith(os.environ["COPY"])


def train(config):
    restored = polytrain.get_checkpoint()
    first = 0
    if restored is not None:
        with restored.as_directory() as files:
            first = int(Path(files, "step").read_text()) + 1
    for step in range(first, 4):
        is_first, checkpoint = polytrain.get_context().get_world_rank() == 0, None
        if is_first:
            Path(config["files"], "step").write_text(str(step))
            checkpoint = Checkpoint.from_directory(config["files"])
        polytrain.report({"step": step}, checkpoint=checkpoint, upload="sync")
        if config["killed"] and step == 1 and is_first and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)


for num_workers, options in ((0, {}), (2, {"cluster": "local"})):
    files = directory / f"files {num_workers}"
    files.mkdir()
    trainer = make_trainer(
        "reference",
        train,
        train_loop_config={"files": str(files), "killed": num_workers > 0},
        scaling_config=ScalingConfig(num_workers=num_workers, **options),
        run_config=RunConfig(
            name=f"run {num_workers}",
            storage_path=directory,
            failure_config=polytrain.FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()
    assert result.metrics == {"step": 3}, result
    assert result.restarts == (num_workers > 0), result
    assert trainer.fit().metrics == {"step": 3}
"""


@pytest.mark.sweep
@pytest.mark.parametrize("missing", [*map(only_in_sweep, SATELLITES), "all"])
def test_the_kernel_does_without(missing: str, tmp_path: Path) -> None:
    copy = tmp_path / "src"
    shutil.copytree(Path(polytrain.__file__).parent, copy / "polytrain")
    folders = SATELLITES if missing == "all" else (missing,)
    for folder in (door for each in folders for door in (DOORS if each == "doors" else (each,))):
        shutil.rmtree(copy / "polytrain" / folder)
    environment = {
        **os.environ,
        "COPY": str(copy),
        "PYTHONPATH": os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")]),
    }
    commands = [[sys.executable, "-c", RUN]]
    if missing == "all":
        pytest_ = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        commands.append([*pytest_, *KERNELS_TESTS])
    for command in commands:
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]


def imported(folder: str) -> Iterator[str]:
    """The modules of `polytrain` that a folder imports, without its own."""
    for path in sorted((Path(polytrain.__file__).parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polytrain."):
                module = str(node.module).removeprefix("polytrain.")
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
                # A package that a module is imported from is that module.
                yield names[1] if module in PACKAGES else module


PACKAGES = {path.name for path in Path(polytrain.__file__).parent.iterdir() if path.is_dir()}


@pytest.mark.parametrize("satellite", [*SATELLITES[:-1], *DOORS])
def test_a_satellite_uses_the_rooms_that_are_named_here(satellite: str) -> None:
    rooms = [*ROOMS, "extension", *SATELLITES, *OWN_ROOMS.get(satellite, ())]
    others = {
        module
        for module in imported(satellite)
        if not any(f"{module}.".startswith(f"{room}.") for room in rooms)
    }
    assert others == set()


@pytest.mark.parametrize("point", [point for point in satellites.__all__ if point != "has"])
def test_each_point_leads_to_a_module(point: str) -> None:
    assert satellites.has(point)
    assert getattr(satellites, point).__name__.startswith("polytrain.")


def test_what_a_missing_satellite_was_asked_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(satellites._POINTS, "trackers", ("polytrain.gone.attached", "A tracker"))
    assert not satellites.has("trackers")
    with pytest.raises(ModuleNotFoundError, match=r"A tracker needs polytrain\.gone, which"):
        _ = satellites.trackers
