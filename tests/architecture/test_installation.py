"""Commands that install: those that anything names work, and bring what the examples import."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polytrain_plugins.installed import install_command

ROOT = Path(__file__).parents[2]
EXTRAS = {
    extra: requirements
    for extra, (*_, requirements) in runpy.run_path(str(ROOT / ".ci/hatch_metadata.py"))[
        "EXTRAS"
    ].items()
}
UNIONS = ("all", "all-cpu")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

MODULES = {
    "scikit-learn": ("sklearn",),
    "xgboost": ("xgboost", "polytrain_xgboost"),
    "xgboost-cpu": ("xgboost", "polytrain_xgboost"),
    "lightgbm": ("lightgbm", "polytrain_lightgbm"),
    "torch": ("torch", "polytrain_torch"),
    "tensorflow": ("tensorflow", "polytrain_tf"),
    "tensorflow-cpu": ("tensorflow", "polytrain_tf"),
}
"""Modules of a distribution that is called differently. A plugin comes with its framework."""

OF_THE_CORE = {"polytrain", "polytrain_plugins", "numpy", "pyarrow"}

OTHERS = {"jax", "pytest", "datasets", "keras", "moto", "scikit-learn", "lightning", "accelerate"}
OTHERS |= {"transformers", "deepspeed", "torch", "pandas", "peft", "tensorflow"}
"""Distributions on PyPI that commands name besides the extras."""

OTHERS |= {"mylib"}
"""A directory that `polytrain new-backend` writes."""


def modules_of(extras: list[str]) -> set[str]:
    names = {re.split(r"[<>=]", each)[0] for extra in extras for each in EXTRAS[extra]}
    return {module for name in names for module in MODULES.get(name, (name,))}


def examples_of(page: Path) -> Iterator[str]:
    """Yield what a page shows in Python, and what scripts are after the changes that it shows."""
    for kind, text in re.findall(r"^```(python|diff)\b.*\n((?s:.*?))^```", page.read_text(), re.M):
        lines = text.splitlines()
        if kind == "diff":
            lines = [line[1:] for line in lines if not line.startswith("-")]
        yield "\n".join(lines)


def imports_of(page: Path) -> set[str]:
    found: set[str] = set()
    for example in examples_of(page):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
    return {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - OF_THE_CORE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_extras_of_a_page_bring_what_its_examples_import(page: Path) -> None:
    table = (ROOT / "docs/install.md").read_text()
    name = "../README.md" if page.name == "README.md" else page.name
    row = re.search(rf"\]\({name}\) \| `pip install '\.\[([^\]]+)\]'`", table)
    brought = set() if row is None else modules_of(row[1].split(","))
    assert imports_of(page) <= brought


def test_readmes_first_example_needs_no_more_than_readmes_first_command() -> None:
    text = (ROOT / "README.md").read_text()
    command = re.search(r"^pip install '\.\[([^\]]+)\]'", text, flags=re.MULTILINE)
    first = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert command
    assert first
    imported = set(re.findall(r"^from (\w+)|^import (\w+)", first[1], flags=re.MULTILINE))
    names = {name for pair in imported for name in pair if name} - OF_THE_CORE
    assert names <= modules_of(command[1].split(","))


PLACES = [
    *PAGES,
    *sorted(ROOT.glob("*/README.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
    *(file for part in ("core", "plugins") for file in sorted((ROOT / part / "src").rglob("*.py"))),
    *sorted(ROOT.glob("plugin_*/src/**/*.py")),
]


@pytest.mark.parametrize(
    "place",
    [each for each in PLACES if "pip install" in each.read_text()],
    ids=lambda place: str(place.relative_to(ROOT)),
)
def test_commands_name_what_exists(place: Path) -> None:
    commands = [
        re.split(r"`|\"|#|  |,|\. |$", line.partition("pip install ")[2])[0]
        for line in place.read_text().splitlines()
        if "pip install " in line
    ]
    for command in commands:
        for word in command.split():
            bare = word.strip("'")
            if bare.startswith("-") or "{" in bare or "://" in bare:
                continue
            if bare.startswith("."):
                path, _, extras = bare.rstrip("]").partition("[")
                assert (ROOT / path / "pyproject.toml").is_file(), command
                known = {*EXTRAS, *UNIONS}
            elif bare.startswith("polytrain["):
                # Only in code, which replaces it by the checkout.
                assert place.suffix == ".py" or place.parent.name == "reference", command
                extras, known = bare.rstrip("]").partition("[")[2], {*EXTRAS}
            elif re.match(r"[a-z]", bare):
                name = re.split(r"[<>=\[]", bare)[0]
                if name in {"on", "into", "takes", "downloads", "or", "and", "command", "name"}:
                    break  # a sentence goes on
                assert name in OTHERS, command
                continue
            else:
                continue
            assert {*filter(None, extras.split(","))} <= known, command


def test_a_command_names_the_checkout_that_this_is() -> None:
    command = install_command("pip install 'polytrain[tf]', or 'polytrain[tf-cpu]' without GPUs")
    assert command == f"pip install '{ROOT}[tf]', or '{ROOT}[tf-cpu]' without GPUs"
