"""A module has one job: none of ours is over 400 lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 400

MODULES = sorted(
    path
    for folder in ("*/src", "tests", "examples", ".ci")
    for path in ROOT.glob(f"{folder}/**/*.py")
    if "__pycache__" not in path.parts
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_measure() -> None:
    assert len({path.parts[len(ROOT.parts)] for path in MODULES}) >= 7


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_module_is_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LIMIT


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_every_module_says_its_job(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text))
