"""docs/reference.md is what the docstrings say, and every public name has one."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path

import pytest

import polytrain
import polytrain_plugins

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    text: str = runpy.run_path(str(ROOT / ".ci/reference_page.py"))["page"]()
    return text


def test_the_page_is_up_to_date(page: str) -> None:
    written = (ROOT / "docs/reference.md").read_text()
    assert written == page, "docs/reference.md is older than the docstrings: make reference"


@pytest.mark.parametrize(
    "path",
    [
        *(f"polytrain.{name}" for name in polytrain.__all__),
        *(f"polytrain_plugins.{name}" for name in polytrain_plugins.__all__),
    ],
)
def test_a_public_name_is_described(page: str, path: str) -> None:
    # What both packages export is there once.
    headings = (f"`{path}`", f"`{path.replace('polytrain_plugins.', 'polytrain.')}`")
    entries = [entry for entry in page.split("\n### ") if entry.startswith(headings)]
    assert entries, f"{path} isn't in the reference"
    words = entries[0].partition("\n")[2].replace("```", "")
    assert len(words.split()) >= 3, f"{path} has no docstring"


def test_every_configuration_field_is_there(page: str) -> None:
    for config in (
        polytrain.ScalingConfig,
        polytrain.RunConfig,
        polytrain.FailureConfig,
        polytrain.CheckpointConfig,
        polytrain.DataConfig,
    ):
        entry = page.split(f"### `polytrain.{config.__name__}`\n")[1].split("\n### ")[0]
        for each in fields(config):
            assert f"- `{each.name}" in entry, f"{config.__name__}.{each.name}"
