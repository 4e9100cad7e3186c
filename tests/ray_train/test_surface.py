"""Every public name of Ray Train is here, or there is a sentence on what to use instead."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import polytrain
from polytrain.config.ray_arguments import (
    CHECKPOINT,
    DATA,
    FAILURE,
    RUN,
    SCALING,
    VALIDATION,
    VALIDATION_TASK,
)
from polytrain.ray_names.missing import ABSENT
from polytrain_plugins import Shard
from polytrain_plugins.shard import ABSENT_IN_SHARDS

MODULES = {
    "ray.train": "polytrain",
    "ray.train.torch": "polytrain.torch",
    "ray.train.xgboost": "polytrain.xgboost",
    "ray.train.lightgbm": "polytrain.lightgbm",
    "ray.train.tensorflow": "polytrain.tensorflow",
    "ray.train.lightning": "polytrain.lightning",
    "ray.train.huggingface.transformers": "polytrain.huggingface.transformers",
}

# What they are called with: in their order, each with its default.
CALLED = {
    "ray.train": (
        *("CheckpointConfig", "DataConfig", "FailureConfig", "RunConfig", "ScalingConfig"),
        *("Checkpoint", "get_checkpoint", "get_context", "get_dataset_shard", "report"),
        *("ValidationConfig", "ValidationTaskConfig"),
    ),
    "ray.train.torch": (
        *("TorchConfig", "TorchTrainer", "enable_reproducibility", "get_device", "get_devices"),
        *("prepare_data_loader", "prepare_model"),
    ),
    "ray.train.xgboost": ("RayTrainReportCallback", "XGBoostConfig", "XGBoostTrainer"),
    "ray.train.lightgbm": (
        *("LightGBMConfig", "LightGBMTrainer", "RayTrainReportCallback", "get_network_params"),
        "normalize_pandas_for_lightgbm",
    ),
    "ray.train.tensorflow": ("TensorflowConfig", "TensorflowTrainer"),
    "ray.train.tensorflow.keras": ("ReportCheckpointCallback",),
    "ray.train.huggingface.transformers": ("prepare_trainer",),
}

# Configurations take these without names too, and None for their default.
CONFIGS = {"ScalingConfig": SCALING, "DataConfig": DATA, "FailureConfig": FAILURE} | {
    "CheckpointConfig": CHECKPOINT,
    "RunConfig": RUN,
    "ValidationConfig": VALIDATION,
    "ValidationTaskConfig": VALIDATION_TASK,
}

# In a process of its own, once: it imports every framework, and Ray.
COMPARES = """
import inspect, json, sys
from importlib import import_module

def parameters(module, called):
    return {
        name: [
            (each.name, each.kind is not each.KEYWORD_ONLY, repr(each.default))
            for each in inspect.signature(getattr(module, name)).parameters.values()
        ]
        for name in called
    }

def compared(theirs, ours, called):
    names = {}
    for name in getattr(theirs, "__all__", ()):
        try:
            names[name] = "" if getattr(ours, name) is not None else "None"
        except AttributeError as error:
            names[name] = str(error)
    methods = {}
    for name in ("Checkpoint", "Result", "TrainContext", "UserCallback"):
        for method in dir(getattr(theirs, name, None)):
            if not method.startswith("_") and hasattr(theirs, name):
                try:
                    getattr(getattr(ours, name), method)
                except AttributeError as error:
                    methods[f"{name}.{method}"] = str(error)
    return names, parameters(theirs, called), parameters(ours, called), methods

found = {
    name: compared(import_module(name), import_module(counterpart), called)
    for name, counterpart, called in json.loads(sys.argv[1])
}
print("FOUND", json.dumps(found))
"""


@cache
def all_compared() -> dict[str, list[dict[str, Any]]]:
    """Compare each module of Ray Train with its counterpart; see `compared`."""
    modules = [
        (module, module.replace("ray.train", "polytrain"), CALLED.get(module, ()))
        for module in dict.fromkeys([*MODULES, *CALLED])
    ]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARES, json.dumps(modules)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    [line] = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, list[dict[str, Any]]] = json.loads(line.removeprefix("FOUND "))
    return found


def compared(module: str) -> list[dict[str, Any]]:
    """What a module of Ray Train and its counterpart have.

    Returns:
        Its public names, each with the error that polytrain's counterpart raises for it; the
        parameters of what is in `CALLED`, in both: name, whether it is positional, default; and
        the methods of its classes that polytrain's don't have, with their errors.
    """
    return all_compared()[module]


@pytest.mark.parametrize(("theirs", "ours"), MODULES.items())
def test_each_name_is_here_or_has_a_sentence(theirs: str, ours: str) -> None:
    found, *_ = compared(theirs)
    assert found
    lacking = {name: error for name, error in found.items() if error}
    sentences = {name: error for name, error in lacking.items() if "no counterpart of" in error}
    assert lacking == sentences
    # A name that is here needs no sentence.
    assert not (found.keys() - lacking.keys()) & ABSENT.get(ours, {}).keys()


def test_each_method_is_here_or_has_a_sentence() -> None:
    *_, lacking = compared("ray.train")
    assert {name for name, error in lacking.items() if "no counterpart of" not in error} == set()
    assert "TrainContext.get_metadata" in lacking


@pytest.mark.parametrize(("module", "names"), CALLED.items())
def test_it_is_called_as_in_ray_train(module: str, names: tuple[str, ...]) -> None:
    _, theirs, ours, _ = compared(module)
    for name in names:
        if name in CONFIGS:
            order, absent = CONFIGS[name]["order"], CONFIGS[name]["absent"]
            assert order == tuple(each for each, _, _ in theirs[name])
            assert set(order) == {each for each, _, _ in ours[name]} & set(order) | set(absent)
            continue
        own = {each: (place, default) for place, (each, _, default) in enumerate(ours[name])}
        for place, (each, is_positional, default) in enumerate(theirs[name]):
            assert each in own, f"{name}({each}=)"
            assert own[each][1] in (default, "None"), f"{name}({each}=)"
            assert not is_positional or own[each][0] == place, f"{name}({each}=)"


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in ABSENT.items() for name in names]
)
def test_a_name_that_is_not_here_says_what_to_use(module: str, name: str) -> None:
    package, _, cls = module.rpartition(".")
    found = getattr(import_module(package), cls) if cls[:1].isupper() else import_module(module)
    with pytest.raises(AttributeError, match=f"no counterpart of .*{name}: .{{15}}"):
        getattr(found, name)
    assert not hasattr(found, name)
    if found.__name__ != module:
        return
    with pytest.raises(ImportError, match=f"no counterpart of .*{name}: .{{15}}"):
        exec(f"from {module} import {name}")


def test_shards_have_the_methods_of_rays_iterator_or_say_what_to_use(tmp_path: Path) -> None:
    from ray.data import DataIterator

    theirs = {name for name in dir(DataIterator) if not name.startswith("_")}
    assert theirs - set(dir(Shard)) == ABSENT_IN_SHARDS.keys()
    called = {name for name in theirs if callable(getattr(DataIterator, name))}
    assert {name for name in called if not callable(getattr(Shard, name, print))} == set()
    seen: list[str] = []

    def train() -> None:
        shard = polytrain.get_dataset_shard("train")
        for name in [*ABSENT_IN_SHARDS, "bacth_size"]:
            with pytest.raises(AttributeError) as error:
                getattr(shard, name)
            seen.append(str(error.value).partition(" has no ")[2])

    polytrain.make_trainer(
        "reference",
        train,
        datasets={"train": {"x": [1.0]}},
        scaling_config=polytrain.ScalingConfig(num_workers=0),
        run_config=polytrain.RunConfig(storage_path=tmp_path),
    ).fit()
    sentences = [f"{name}: {instead}." for name, instead in ABSENT_IN_SHARDS.items()]
    assert seen == [*sentences, "bacth_size"]
