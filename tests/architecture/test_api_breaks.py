"""A break of a public name is found, and one of an inner name is nobody's business."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

FACE = '''
"""A package."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from polytrain.inner import train
__all__ = ["train"]
'''
INNER = '''
"""Where the functions are."""
def train(data, rounds=10):
    """Train."""
def divide(data, parts):
    """Divide."""
'''


@pytest.fixture
def api_breaks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return importlib.import_module("api_breaks")


def checkout(directory: Path, face: str = FACE, inner: str = INNER) -> Path:
    package = directory / "core/src/polytrain"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(face)
    (package / "inner.py").write_text(inner)
    return directory


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("train(data, rounds=10)", "train(data)"), "removed: [positional or keyword] rounds"),
        (("train(data, rounds=10)", "train(data, rounds)"), "Parameter is now required"),
        (("divide(data, parts)", "divide(data)"), None),
        (("train(data, rounds=10)", "train(data, rounds=10, seed=0)"), None),
    ],
)
def test_what_breaks_for_users_is_found(
    api_breaks: ModuleType, tmp_path: Path, change: tuple[str, str], said: str | None
) -> None:
    old = checkout(tmp_path / "old")
    new = checkout(tmp_path / "new", inner=INNER.replace(*change))
    found = [*api_breaks.breaks(old, new)]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_a_name_that_is_gone_is_found(api_breaks: ModuleType, tmp_path: Path) -> None:
    old = checkout(tmp_path / "old")
    new = checkout(tmp_path / "new", face='"""A package."""\n__all__ = []\n')
    [found] = api_breaks.breaks(old, new)
    assert "train" in found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0.1.0", "0.1.1", True),
        ("0.1.0", "0.2.0", False),
        ("1.2.0", "1.3.0", True),
        ("1.2.0", "2.0.0", False),
        ("0.9.0", "1.0.0", False),
    ],
)
def test_versions_that_promise_the_same(
    api_breaks: ModuleType, old: str, new: str, expected: bool
) -> None:
    assert api_breaks.compatible(old, new) is expected


def test_a_release_is_compared_with_the_one_before(api_breaks: ModuleType, tmp_path: Path) -> None:
    """When its workflow runs, its own tag is there already."""

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.com")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit() -> None:
        git("commit", "--allow-empty", "--message", "Change something")

    git("init")
    commit()
    found = [api_breaks.last_release(tmp_path)]
    for version in ("v0.1.0", "v0.2.0"):
        git("tag", version)
        found.append(api_breaks.last_release(tmp_path))
        commit()
        found.append(api_breaks.last_release(tmp_path))
    assert found == [None, None, "v0.1.0", "v0.1.0", "v0.2.0"]
