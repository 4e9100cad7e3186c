"""Every public name of Ray Train is here, or there is a sentence on what to use instead."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from polytrain.common.ray_train import ABSENT

MODULES = {
    "ray.train": "polytrain",
    "ray.train.torch": "polytrain.torch",
    "ray.train.xgboost": "polytrain.xgboost",
    "ray.train.lightgbm": "polytrain.lightgbm",
    "ray.train.tensorflow": "polytrain.tensorflow",
    "ray.train.lightning": "polytrain.lightning",
    "ray.train.huggingface.transformers": "polytrain.huggingface.transformers",
}

# In a process of its own: it imports every framework, and Ray.
COMPARES = """
import json, sys
from importlib import import_module

theirs, ours = import_module(sys.argv[1]), import_module(sys.argv[2])
found = {}
for name in theirs.__all__:
    try:
        found[name] = "" if getattr(ours, name) is not None else "None"
    except AttributeError as error:
        found[name] = str(error)
print("FOUND", json.dumps(found))
"""


def compared(theirs: str, ours: str) -> dict[str, str]:
    """Ray Train's names in a module, each with the error that polytrain's raises for it."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARES, theirs, ours],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    [line] = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, str] = json.loads(line.removeprefix("FOUND "))
    return found


@pytest.mark.parametrize(("theirs", "ours"), MODULES.items())
def test_each_name_is_here_or_has_a_sentence(theirs: str, ours: str) -> None:
    found = compared(theirs, ours)
    assert found
    lacking = {name: error for name, error in found.items() if error}
    sentences = {name: error for name, error in lacking.items() if "no counterpart of" in error}
    assert lacking == sentences
    # A name that is here needs no sentence.
    assert not (found.keys() - lacking.keys()) & ABSENT.get(ours, {}).keys()


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
