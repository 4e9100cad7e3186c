"""The reference is what the docstrings say, and every public name has one."""

from __future__ import annotations

import runpy
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

import polytrain
import polytrain_plugins

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    written: dict[Path, str] = runpy.run_path(str(ROOT / ".ci/reference_page.py"))["pages"]()
    return written


@pytest.fixture(scope="module")
def text(pages: dict[Path, str]) -> str:
    return "\n".join(pages.values())


def test_the_pages_are_up_to_date(pages: dict[Path, str]) -> None:
    found = {
        path: path.read_text()
        for path in [ROOT / "docs/reference.md", *(ROOT / "docs/reference").iterdir()]
    }
    assert found == pages, "the reference is older than the docstrings: make reference"


@pytest.mark.parametrize(
    "path",
    [
        *(f"polytrain.{name}" for name in polytrain.__all__),
        *(f"polytrain_plugins.{name}" for name in polytrain_plugins.__all__),
    ],
)
def test_a_public_name_is_described(text: str, path: str) -> None:
    # What both packages export is there once.
    headings = (f"`{path}`", f"`{path.replace('polytrain_plugins.', 'polytrain.')}`")
    entries = [entry for entry in text.split("\n## ") if entry.startswith(headings)]
    assert entries, f"{path} isn't in the reference"
    words = entries[0].partition("\n")[2].replace("```", "")
    assert len(words.split()) >= 3, f"{path} has no docstring"


def test_every_configuration_field_is_there(text: str) -> None:
    for config in (
        polytrain.ScalingConfig,
        polytrain.RunConfig,
        polytrain.FailureConfig,
        polytrain.CheckpointConfig,
        polytrain.DataConfig,
    ):
        entry = text.split(f"\n## `polytrain.{config.__name__}`\n")[1].split("\n## ")[0]
        for each in fields(config):
            assert f"- `{each.name}" in entry, f"{config.__name__}.{each.name}"


def test_what_a_call_returns_is_one_sentence_however_many_lines_it_takes(text: str) -> None:
    lines = text.splitlines()
    assert not [
        after
        for before, after in pairwise(lines)
        if before.startswith("- returns") and after.startswith("- returns")
    ]
