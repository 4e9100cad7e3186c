"""Whatever warns that it will be gone stands in docs/deprecations.md, until it is gone."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deprecations.md").read_text()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
WARNINGS = {"DeprecationWarning", "PendingDeprecationWarning", "FutureWarning"}


def deprecated(sources: list[Path]) -> Iterator[str]:
    """Yield the functions and classes that are deprecated, or warn of something that is."""
    for source in sources:
        for path in sorted(source.rglob("*.py")):
            module = ".".join(path.relative_to(source).with_suffix("").parts)
            yield from inside(ast.parse(path.read_text()), module.removesuffix(".__init__"))


def inside(node: ast.AST, name: str) -> Iterator[str]:
    if warns(node):
        yield name
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from inside(child, f"{name}.{child.name}")
        else:
            yield from inside(child, name)


def warns(node: ast.AST) -> bool:
    """Whether this is a call of `warn` with such a category, or a decorator `deprecated`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn"):
        return any(isinstance(each, ast.Name) and each.id in WARNINGS for each in ast.walk(node))
    decorators = getattr(node, "decorator_list", [])
    return any(re.match(r"([\w.]+\.)?deprecated\(", ast.unparse(each)) for each in decorators)


def problems(page: str, sources: list[Path], version: str) -> list[str]:
    """What is wrong with the table."""
    rows = dict(re.findall(r"^\| `([\w.]+)` \| [\d.]+ \| ([\d.]+|never) \|", page, re.MULTILINE))
    found = {*deprecated(sources)}
    return [
        *(f"{name} has no row" for name in sorted(found - {*rows})),
        *(f"{name} isn't deprecated in the code" for name in sorted({*rows} - found)),
        *(
            f"{name} should be gone since {gone}"
            for name, gone in rows.items()
            if gone != "never" and Version(gone) <= Version(version)
        ),
    ]


def test_the_table_is_complete_and_nothing_in_it_is_overdue() -> None:
    sources = [path / "src" for path in ROOT.iterdir() if (path / "src").is_dir()]
    assert len(sources) == 6
    assert problems(PAGE, sources, VERSION) == []


@pytest.mark.parametrize(
    "code",
    [
        "def train(): warnings.warn('use fit', DeprecationWarning, stacklevel=2)",
        "def train(): warn('use fit', category=FutureWarning)",
        "@deprecated('use fit')\ndef train(): ...",
        "@warnings.deprecated('use fit')\nclass train: ...",
    ],
)
@pytest.mark.parametrize(
    ("row", "version", "expected"),
    [
        ("", "1.0", ["old.train has no row"]),
        ("| `old.train` | 1.0 | 1.2 | `fit` |", "1.1", []),
        ("| `old.train` | 1.0 | never | `fit` |", "1.1", []),
        ("| `old.train` | 1.0 | 1.2 | `fit` |", "1.2", ["old.train should be gone since 1.2"]),
    ],
)
def test_what_is_deprecated_needs_a_row_until_it_is_gone(
    tmp_path: Path, code: str, row: str, version: str, expected: list[str]
) -> None:
    (tmp_path / "old.py").write_text(code)
    assert problems(row, [tmp_path], version) == expected


def test_a_row_without_a_warning_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("def train(): warnings.warn('slow', RuntimeWarning)")
    row = "| `old.train` | 1.0 | 1.2 | `fit` |"
    assert problems(row, [tmp_path], "1.1") == ["old.train isn't deprecated in the code"]
