"""ARCHITECTURE.md names files, functions and packages: those that there are."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
WALKS = re.findall(r"^\*\*(From .*)\*\*\n((?:\n|\d+\..*\n)+)", PAGE, re.MULTILINE)


def defined_in(file: Path) -> set[str]:
    """Classes and functions of a module, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
    return names


def test_there_are_three_walks_of_fifteen_files_or_fewer() -> None:
    assert len(WALKS) == 3
    for _, steps in WALKS:
        assert 8 <= len(re.findall(r"^\d+\.", steps, re.MULTILINE)) <= 15


@pytest.mark.parametrize(("title", "steps"), WALKS, ids=[title for title, _ in WALKS])
def test_what_a_walk_names_is_there(title: str, steps: str) -> None:
    lines = [line for line in steps.splitlines() if ".py`" in line]
    assert len(lines) >= 8
    for line in lines:
        file, *names = re.findall(r"`([\w./]+)`", line.partition(": ")[0])
        defined = defined_in(ROOT / file)
        assert names
        for name in names:
            if not name.endswith(".py"):
                assert name in defined, f"{file} has no {name}"


def test_every_file_that_is_named_is_there() -> None:
    for path in re.findall(r"`((?:core|docs|tests|plugin\w*)/[\w./-]+\.\w+)`", PAGE):
        assert (ROOT / path).is_file(), path


def test_every_package_has_a_row_in_the_order_of_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [
        each["layers"] for each in contracts["contracts"] if each.get("containers") == ["polytrain"]
    ]
    rows = re.findall(r"^\| (`polytrain\..*?) \|", PAGE, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`polytrain\.(\w+)`", row)]
    assert named == [name for layer in layers for name in re.split(r" [:|] ", layer)]


def test_the_glossary_has_twenty_terms_at_most() -> None:
    glossary = PAGE.partition("## Glossary")[2].partition("\n## ")[0]
    terms = re.findall(r"^\| (?!term|---)(.+?) \|", glossary, re.MULTILINE)
    assert 10 <= len(terms) <= 20
    assert terms == sorted(terms)


def test_each_part_is_added_in_five_steps_or_fewer() -> None:
    chapter = PAGE.partition("## How to add a part")[2].partition("\n## ")[0]
    recipes = re.split(r"^\*\*.*\*\*$", chapter, flags=re.MULTILINE)[1:]
    assert len(recipes) == 4
    assert all(1 <= len(re.findall(r"^\d\.", each, re.MULTILINE)) <= 5 for each in recipes)
