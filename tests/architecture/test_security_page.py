"""docs/security.md names the tests that hold what it says: those that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
CHAPTERS = re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("title", "text"), CHAPTERS, ids=[title for title, _ in CHAPTERS])
def test_a_chapter_names_tests_and_they_are_there(title: str, text: str) -> None:
    named = re.findall(r"^- `(tests/[\w/]+\.py)::(test_\w+)`$", text, re.MULTILINE)
    assert named
    assert len(named) == text.count("\n- `tests/")
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_boundary_has_a_chapter() -> None:
    assert [title for title, _ in CHAPTERS] == [
        "The run's directory",
        "The machine",
        "The network",
        "The page and the ports",
    ]


def test_the_page_is_listed_where_the_docs_are() -> None:
    for page in ("README.md", "SECURITY.md"):
        assert "(docs/security.md)" in (ROOT / page).read_text()
