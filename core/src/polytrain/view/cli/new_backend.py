"""`polytrain new-backend`: a distribution with a backend that passes the conformance kit."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import click

from polytrain.output.echo import echo_lines
from polytrain.view.cli.found import Refused, file_at

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

STAND_IN = "mylib"
"""The name in the template, in place of which NAME is written."""

_WRITTEN = {".py", ".toml", ".md"}
"""Kinds of the template's files; beside them there may be caches."""


@click.command("new-backend")
@click.argument("name")
@click.option("--into", metavar="DIRECTORY", help="The directory to write; by default NAME.")
def command(name: str, into: str | None) -> None:
    """Write a distribution with a backend called NAME, which passes the conformance kit.

    It fits a linear model. Change it step by step into yours: its README says how.
    """
    directory = file_at(into, "--into") if into else Path(name)
    problem = _problem_of_name(name) or _problem_of_directory(directory)
    if problem is not None:
        raise Refused(problem)
    try:
        for path, text in _renamed(name):
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{directory} can't be written: {error}") from error
    echo_lines(
        f"{directory} has a backend that passes the conformance kit:\n"
        f"  pip install -e '{directory}[testing]'\n"
        f"  pytest {directory}\n"
        f"{directory / 'README.md'} says what to change, step by step."
    )


def _problem_of_name(name: str) -> str | None:
    """Return what is wrong with a backend's name, and what to do."""
    from importlib.metadata import PackageNotFoundError, distribution

    from polytrain_plugins import backend_names

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        better = re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_0123456789")
        meant = f", such as {better}" if better else ""
        return (
            f"{name!r} can't be a backend's name, because it is a part of a module's name too. Use "
            f"lower-case letters, digits and _, with a letter first{meant}."
        )
    title = class_name(name)
    if keyword.iskeyword(name) or keyword.iskeyword(title):
        return f"{name!r} is a word of Python's. Choose another name, such as {name}_backend."
    if title in _names_of_template():
        return (
            f"{name!r} gives its class the name {title}, which the backend's code uses for "
            f"something else. Choose another name, such as {name}_backend."
        )
    if name in backend_names():
        return (
            f"a backend {name!r} is installed. Choose another name; `polytrain backends` lists "
            "those that are taken."
        )
    try:
        distribution(f"polytrain-{name}")
    except PackageNotFoundError:
        if find_spec(f"polytrain_{name}") is None:
            return None
    return (
        f"polytrain-{name.replace('_', '-')} or the module polytrain_{name} is installed. Choose "
        "another name, or uninstall it first."
    )


def _problem_of_directory(directory: Path) -> str | None:
    """Return why a directory can't be written to without mixing up what is there."""
    try:
        if not directory.exists() and not directory.is_symlink():
            return None
        if not directory.is_dir():
            return f"{directory} is a file. Name another directory with --into."
        if any(directory.iterdir()):
            return f"{directory} isn't empty. Name another directory with --into, or empty it."
    except OSError as error:
        return f"{directory} can't be read: {error}. Name another directory with --into."
    return None


def class_name(name: str) -> str:
    """Return the name of the class of a backend: MyLib of my_lib."""
    return "".join(part.capitalize() for part in name.split("_"))


def _renamed(name: str) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the path and the text of each file of the distribution."""
    for path, text in template():
        yield PurePosixPath(_with_name(str(path), name)), _with_name(text, name)


def _with_name(text: str, name: str) -> str:
    return text.replace(STAND_IN, name).replace(class_name(STAND_IN), class_name(name))


def template() -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the path and the text of each file of the template."""
    return _below(files("polytrain.view") / "backend_template", PurePosixPath())


def _below(directory: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and not entry.name.startswith((".", "__")):
            yield from _below(entry, path / entry.name)
        elif PurePosixPath(entry.name).suffix in _WRITTEN:
            yield path / entry.name, entry.read_text(encoding="utf-8")


def _names_of_template() -> set[str]:
    """Return the names that the template's code uses."""
    names: set[str] = set()
    for path, text in template():
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Name):
                    names.add(node.id)
                elif isinstance(node, ast.alias | ast.ClassDef):
                    names.add(node.name)
    return names - {class_name(STAND_IN)}
