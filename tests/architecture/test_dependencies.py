"""docs/dependencies.md has every requirement of the metadata, with its reason and its licence."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ROW = re.compile(r"^\| `([^`]+)` \| (.*) \| (.*) \|$", flags=re.MULTILINE)
ROWS = {
    requirement: (reason, licence)
    for requirement, reason, licence in ROW.findall((ROOT / "docs/dependencies.md").read_text())
}


def required() -> Iterator[str]:
    """The requirements of all distributions, but for one another."""
    for path in [ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")]:
        found = tomllib.loads(path.read_text())
        project = found["project"]
        yield f"python{project['requires-python']}"
        yield from found["build-system"]["requires"]
        yield from project.get("dependencies", [])
        for extra in project.get("optional-dependencies", {}).values():
            yield from extra
    for *_, frameworks in runpy.run_path(str(ROOT / ".ci/hatch_metadata.py"))["EXTRAS"].values():
        yield from frameworks


def test_the_table_has_all_requirements_and_no_other() -> None:
    foreign = {each for each in required() if not each.startswith("polytrain")}
    assert sorted(ROWS) == sorted(foreign)


def test_each_has_a_floor_a_reason_and_a_licence() -> None:
    assert [each for each in ROWS if not re.match(r"[\w-]+>=\d", each)] == []
    assert [each for each, row in ROWS.items() if not all(row)] == []


@pytest.mark.parametrize("requirement", ROWS)
def test_the_licence_is_the_one_of_the_installed_version(requirement: str) -> None:
    try:
        stated = metadata(requirement.partition(">")[0]).get("License-Expression")
    except PackageNotFoundError:
        # Python itself, and builds with GPUs in place of which those without are installed.
        assert requirement.startswith(("python", "xgboost", "tensorflow"))
        return
    assert stated in (None, ROWS[requirement][1])
