"""All distributions are released together: one version, pinned to one another, all typed."""

from __future__ import annotations

import tomllib
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
