"""docs/exactness.md names, for each promise, a test that there is and that runs."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / ".ci/exactness_page.py"))
PROMISES: Mapping[str, tuple[tuple[str, str, str], ...]] = SCRIPT["PROMISES"]
TESTS = [test for promises in PROMISES.values() for _, _, test in promises]


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / "docs/exactness.md").read_text()
    assert written == SCRIPT["page"](), "docs/exactness.md is older than its rows: make reference"


@pytest.mark.parametrize("test", TESTS)
def test_a_promise_has_a_test_that_is_not_skipped(test: str) -> None:
    file, _, name = test.partition("::")
    functions = [each for each in ast.parse((ROOT / file).read_text()).body if named(each) == name]
    assert len(functions) == 1, f"{file} has no {name}"
    [function] = functions
    assert isinstance(function, ast.FunctionDef)
    marks = [ast.unparse(each) for each in function.decorator_list]
    assert not [mark for mark in marks if "skip" in mark or "xfail" in mark]


def named(node: Any) -> str:
    return getattr(node, "name", "")


def test_each_promise_is_made_once() -> None:
    assert len(TESTS) == len({*TESTS})
