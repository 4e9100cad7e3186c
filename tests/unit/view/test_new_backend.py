"""`polytrain new-backend`: what it writes, and what it refuses before it writes anything."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from polytrain.view.cli import main
from polytrain.view.cli.new_backend import template

TEMPLATE = Path(__file__).parents[3] / "core/src/polytrain/view/backend_template"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files_below(directory: Path) -> dict[str, str]:
    return {
        file.relative_to(directory).as_posix(): file.read_text()
        for file in directory.rglob("*")
        if file.is_file() and file.parent.name != "__pycache__"
    }


def test_only_the_name_differs_from_the_template(here: Path) -> None:
    assert main(["new-backend", "river_net"]) == 0
    written = files_below(here / "river_net")
    assert "src/polytrain_river_net/engine.py" in written
    assert "class RiverNetEngine(" in written["src/polytrain_river_net/engine.py"]

    def back(text: str) -> str:
        return text.replace("river_net", "mylib").replace("RiverNet", "Mylib")

    assert {back(name): back(text) for name, text in written.items()} == files_below(TEMPLATE)


def test_files_are_utf_8_whatever_the_locale(here: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "polytrain", "new-backend", "river_net"]
    subprocess.run(command, env={**os.environ, **ascii_only}, check=True, capture_output=True)
    assert "…" in (here / "river_net" / "README.md").read_text(encoding="utf-8")


def test_caches_beside_the_template_are_not_written(
    monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    """The template is tested where it is, which leaves caches."""
    caches = ("__pycache__", ".pytest_cache")
    for name in caches:
        (here / "backend_template" / name).mkdir(parents=True)
        (here / "backend_template" / name / "README.md").write_text("")
    (here / "backend_template" / "model.pyc").write_bytes(b"\xff")
    (here / "backend_template" / "model.py").write_text("")
    monkeypatch.setattr("polytrain.view.cli.new_backend.files", lambda package: here)
    assert [str(path) for path, _ in template()] == ["model.py"]


def test_it_says_what_to_do_next(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-backend", "river", "--into", "work/river-on-polytrain"]) == 0
    said = capsys.readouterr().out
    assert "pip install -e 'work/river-on-polytrain[testing]'" in said
    assert "pytest work/river-on-polytrain" in said
    readme = (here / "work/river-on-polytrain/README.md").read_text()
    assert [line[:3] for line in readme.splitlines() if line[:1].isdigit()] == ["1. ", "2. ", "3. "]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-lib", ", such as my_lib."),
        ("MyLib", ", such as mylib."),
        ("3d", ", such as d."),
        ("_hidden", ", such as hidden."),
        ("café", ", such as caf."),
        ("--", None),
        ("", "with a letter first."),
        ("../evil", ", such as evil."),
        ("a\nb", ", such as a_b."),
        ("class", "a word of Python's. Choose another name, such as class_backend"),
        ("none", "a word of Python's. Choose another name, such as none_backend"),
        ("backend", "gives its class the name Backend"),
        ("path", "gives its class the name Path"),
        ("linear_model", "gives its class the name LinearModel"),
        ("reference", "a backend 'reference' is installed. Choose another name"),
        ("core", "polytrain-core or the module polytrain_core is installed"),
        ("plugins", "polytrain-plugins or the module polytrain_plugins is installed"),
    ],
)
def test_names_that_can_not_be(
    name: str, said: str | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-backend", name]) == 2
    if said is not None:
        assert said in capsys.readouterr().err
    assert [*here.iterdir()] == []


def test_a_directory_with_something_in_it_is_left_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "river").mkdir()
    (here / "river" / "mine.txt").write_text("mine")
    assert main(["new-backend", "river"]) == 2
    said = capsys.readouterr().err
    assert "river isn't empty. Name another directory with --into, or empty it." in said
    assert files_below(here) == {"river/mine.txt": "mine"}


def test_a_file_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "river").write_text("mine")
    assert main(["new-backend", "river"]) == 2
    assert "river is a file. Name another directory" in capsys.readouterr().err
    assert files_below(here) == {"river": "mine"}


def test_a_link_to_nowhere_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.symlink(here / "nowhere", here / "river")
    assert main(["new-backend", "river"]) == 2
    assert "Name another directory" in capsys.readouterr().err
    assert not (here / "nowhere").exists()


def test_an_empty_directory_is_used(here: Path) -> None:
    (here / "river").mkdir()
    assert main(["new-backend", "river"]) == 0
    assert (here / "river" / "pyproject.toml").is_file()


def test_what_can_not_be_written_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("")
    assert main(["new-backend", "river", "--into", "file/river"]) != 0
    assert "file/river can't be" in capsys.readouterr().err


def test_the_template_imports_what_any_backend_may() -> None:
    """The contract, public names, the extension, the kit: nothing that is the core's own."""
    imported = set()
    for file in TEMPLATE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    ours = {name for name in imported if name.split(".")[0] in {"polytrain", "polytrain_plugins"}}
    assert ours == {"polytrain.extension", "polytrain.testing", "polytrain_plugins"}


def test_the_template_needs_the_python_that_polytrain_needs() -> None:
    def project(folder: Path) -> str:
        found = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        return str(found["requires-python"])

    assert project(TEMPLATE) == project(TEMPLATE.parents[4])


GUIDE = TEMPLATE.parents[4] / "docs/writing-a-backend.md"


def test_the_guide_shows_the_whole_pyproject() -> None:
    shown = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert shown == [(TEMPLATE / "pyproject.toml").read_text()]
