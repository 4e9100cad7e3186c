"""All distributions are released together: one version, pinned to one another, all typed.

And the oldest versions of what they need are the same wherever they are written down.
"""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MEMBERS = ["plugins", "core", "plugin_torch", "plugin_xgboost", "plugin_lightgbm", "plugin_tf"]


def project(folder: str) -> dict[str, Any]:
    with (ROOT / folder / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["project"]
    return found


VERSION = project(".")["version"]


def test_no_member_is_forgotten_here() -> None:
    assert sorted(MEMBERS) == sorted(path.parent.name for path in ROOT.glob("*/pyproject.toml"))


@pytest.mark.parametrize("member", MEMBERS)
def test_all_have_one_version(member: str) -> None:
    assert project(member)["version"] == VERSION


@pytest.mark.parametrize("member", MEMBERS)
def test_members_need_each_other_in_exactly_this_version(member: str) -> None:
    ours = [line for line in project(member)["dependencies"] if line.startswith("polytrain")]
    assert all(line.endswith(f"=={VERSION}") for line in ours)
    assert bool(ours) == (member != "plugins")


@pytest.mark.parametrize("member", MEMBERS)
def test_all_need_the_same_python(member: str) -> None:
    assert project(member)["requires-python"] == project(".")["requires-python"]


@pytest.mark.parametrize("member", MEMBERS)
def test_all_are_typed(member: str) -> None:
    [package] = [
        path for path in (ROOT / member / "src").iterdir() if (path / "__init__.py").exists()
    ]
    assert (package / "py.typed").exists()


@pytest.mark.parametrize("member", MEMBERS)
def test_no_member_brings_a_framework(member: str) -> None:
    """The extra that a user chooses decides which build of a framework is installed."""
    needed = {line.split("=")[0].split(">")[0] for line in project(member)["dependencies"]}
    frameworks = {"torch", "xgboost", "xgboost-cpu", "lightgbm", "tensorflow", "tensorflow-cpu"}
    assert needed & frameworks == set()


REQUIREMENTS = ROOT / ".ci" / "requirements"


def needed_by_metadata() -> Iterator[str]:
    """The requirements of all distributions, their extras' included."""
    for member in MEMBERS:
        yield from project(member)["dependencies"]
        for extra in project(member).get("optional-dependencies", {}).values():
            yield from extra
    for *_, frameworks in runpy.run_path(str(ROOT / ".ci/hatch_metadata.py"))["EXTRAS"].values():
        yield from frameworks


def needed_by(file: Path) -> Iterator[str]:
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    yield from (line for line in lines if line)


def oldest(requirements: Iterator[str]) -> set[tuple[str, tuple[int, ...]]]:
    """Distributions and the versions from which on they are taken."""
    found = (re.match(r"([\w-]+)[^>=]*[>=]=([\d.]+)", each) for each in requirements)
    return {
        # 8.1 and 8.1.0 are the same version.
        (each[1].replace("_", "-"), (*map(int, f"{each[2]}.0.0".split(".")[:3]),))
        for each in found
        if each and not each[1].startswith("polytrain")
    }


# XGBoost and TensorFlow with GPUs are gigabytes; the builds without are the same versions.
WITH_GPUS = {"xgboost", "tensorflow"}

OLDEST = {each for each in oldest(needed_by_metadata()) if each[0] not in WITH_GPUS}


def test_each_distribution_has_one_oldest_version() -> None:
    assert sorted(name for name, _ in OLDEST) == sorted({name for name, _ in OLDEST})


def test_the_oldest_versions_that_are_tested_are_those_of_the_metadata() -> None:
    # tf_keras is for tests alone.
    tested = oldest(needed_by(ROOT / ".ci/constraints-lowest.txt"))
    assert tested - oldest(needed_by(REQUIREMENTS / "alone.txt")) == OLDEST


@pytest.mark.parametrize("file", ["frameworks.txt", "libraries.txt"])
def test_development_has_the_versions_of_the_metadata(file: str) -> None:
    assert oldest(needed_by(REQUIREMENTS / file)) <= OLDEST


def test_pins_allow_what_the_metadata_asks_for() -> None:
    pinned = dict(oldest(needed_by(ROOT / ".ci/constraints-py311.txt")))
    assert {name for name, version in OLDEST if pinned[name] < version} == set()
