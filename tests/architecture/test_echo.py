"""Text gets onto a terminal in one place, which makes it printable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "core" / "src" / "polytrain"

_STREAMS = {"stdout", "stderr", "__stdout__", "__stderr__"}

_PRINT = {
    "output/echo.py": "is the place",
    "workers/session/worker_process.py": "prints in a worker process; the driver shows it",
}
_NAME_STREAMS = {
    **_PRINT,
    "view/cli/conformance.py": "has pytest print there",
    "view/cli/following.py": "gives it to the progress display",
    "view/cli/logs.py": "gives it to write_line",
    "events/output.py": "flushes it",
    "view/progress/display.py": "gives it to write_line, and to the lines at the bottom",
    "output/worker_output.py": "gives it to write_line, and asks whether both are one place",
    "workers/processes/forked.py": "makes those of a worker process, and of a zygote for its forks",
}
"""Files that may name a standard stream, and what they do with it; none of them writes to it."""


def test_nothing_but_one_place_prints() -> None:
    found = {place: what for place, what in _places(_prints) if place not in _PRINT}
    assert not found, "use polytrain.output.echo"


def test_standard_streams_are_named_where_it_is_known_why() -> None:
    found = {place for place, _ in _places(_named_streams)}
    assert found == _NAME_STREAMS.keys()


def test_who_names_a_stream_leaves_writing_to_the_one_place() -> None:
    found = {
        place: what
        for place, what in _places(_writes)
        if place in _NAME_STREAMS and place not in _PRINT
    }
    assert not found, "use write_line of polytrain.output.echo"


def _places(find: object) -> Iterator[tuple[str, str]]:
    assert callable(find)
    for place, nodes in _nodes().items():
        for node in nodes:
            if find(node):
                yield place, f"line {node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]


@cache
def _nodes() -> dict[str, list[ast.AST]]:
    """All nodes of each module."""
    places = {path.relative_to(SOURCES).as_posix(): path for path in sorted(SOURCES.rglob("*.py"))}
    return {
        place: list(ast.walk(ast.parse(path.read_text())))
        for place, path in places.items()
        # The conformance kit and chaos runs are tools of a developer, and show their own words.
        if not place.startswith("testing/")
    }


def _prints(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    match node.func:
        case ast.Name(id="print" | "secho") | ast.Attribute(attr="secho" | "echo_via_pager"):
            return True
        case ast.Attribute(value=ast.Name(id="click"), attr="echo" | "prompt" | "confirm"):
            return True
        case ast.Attribute(attr="show", value=ast.Name(id="error")):
            # click prints an error by itself, unless it is told where to.
            return not node.args
    return False


def _named_streams(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="sys"), attr=attribute):
            return attribute in _STREAMS
        case ast.ImportFrom(module="sys", names=names):
            return any(each.name in _STREAMS for each in names)
    return False


def _writes(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="write" | "writelines", value=target)):
            # A log has a file of its own.
            return ast.unparse(target) != "log"
    return False
