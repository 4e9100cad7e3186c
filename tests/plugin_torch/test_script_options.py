"""Scripts in place of a training function: what is refused before any worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polytrain import CheckpointConfig, InvalidJobError, RunConfig, make_trainer


def nothing() -> None:
    pass


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a script, a broken one and a package."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print()")
    Path("broken.py").write_text("x = 1\nif x\n")
    Path("package").mkdir()
    Path("package/__init__.py").touch()


def problems(backend: str = "torch", /, *function: Any, **arguments: Any) -> list[tuple[str, str]]:
    arguments.setdefault("run_config", RunConfig(storage_path="runs", progress=False))
    with pytest.raises(InvalidJobError) as caught:
        make_trainer(backend, *function, **arguments)
    assert not Path("runs").exists()
    return [(each.field, f"{each.what}. {each.remedy}") for each in caught.value.problems]


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"script": "missing.py"}, "script", "no file 'missing.py'"),
        ({"script": "/missing.py"}, "script", "no file '/missing.py'"),
        ({"script": "package"}, "script", "is a directory"),
        ({"script": "broken.py"}, "script", "not Python, line 2"),
        ({"script": 3}, "script", "3 is not a path"),
        ({"script": ""}, "script", "'' is not a path"),
        ({"module": "train.py"}, "module", "script='train.py', or the module's name: 'train'"),
        ({"module": "missing.train"}, "module", "no module 'missing'"),
        ({"module": "not-a-name"}, "module", "not a module's name"),
        ({"script": "train.py", "module": "package"}, "module", "there is a script too"),
        ({"script": "train.py", "args": ["--epochs", 3]}, "args[1]", "3 is not a string. Give '3'"),
        ({"script": "train.py", "args": "--epochs 3"}, "args", "['--epochs', '3']"),
        ({"script": "train.py", "args": {"epochs": 3}}, "args", "not a list of strings"),
        ({"script": "train.py", "datasets": {"train": {"x": [1]}}}, "datasets", "its own data"),
        ({"script": "train.py", "process_group": "gloo"}, "process_group", "init_process_group"),
        ({"script": "train.py", "train_loop_config": {}}, "train_loop_config", "no training func"),
    ],
)
def test_wrong_option(arguments: dict[str, Any], field: str, words: str) -> None:
    [(named, text)] = problems(**arguments)
    assert named == field
    assert words in text


def test_script_and_training_function() -> None:
    [(field, text)] = problems("torch", nothing, script="train.py")
    assert field == "script"
    assert "training function too" in text


def test_arguments_without_a_script() -> None:
    [(field, text)] = problems("torch", nothing, args=["--epochs"])
    assert field == "args"
    assert "train_loop_config" in text


def test_neither_a_script_nor_a_function() -> None:
    [(field, _)] = problems("torch")
    assert field == "train_loop_per_worker"


def test_all_problems_at_once() -> None:
    found = problems("torch", nothing, script="missing.py", args=[1, 2])
    assert [field for field, _ in found] == ["script", "args[0]", "args[1]", "script"]


@pytest.mark.parametrize("backend", ["xgboost", "lightgbm", "reference"])
def test_other_backends_name_the_one_that_runs_scripts(backend: str) -> None:
    found = dict(problems(backend, script="train.py"))
    assert "make_trainer('torch', script=…)" in found["script"]


def test_frequency_of_checkpoints_that_only_the_script_can_make() -> None:
    config = RunConfig(checkpoint_config=CheckpointConfig(checkpoint_frequency=2))
    [(field, _)] = problems("torch", script="train.py", run_config=config)
    assert field == "CheckpointConfig.checkpoint_frequency"
