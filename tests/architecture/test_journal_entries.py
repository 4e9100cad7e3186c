"""ARCHITECTURE.md draws who writes each entry of the journal; each is written, and read."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from polytrain.record import entries

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "core/src/polytrain"
HEADER = "| event | entry | written by |"
MAKES_BUT_WRITES_NOT = "view/cli/following"
"""It yields the last of many reports as one."""


def uses(tree: ast.AST, known: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the entries that a module makes ("write") or recognises ("read")."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                for each in ast.walk(kinds):
                    if isinstance(each, ast.Name) and each.id in known:
                        yield "read", each.id
            case ast.Call(func=ast.Name(id=name)) if name in known:
                yield "write", name
            case ast.MatchClass(cls=ast.Name(id=name)) if name in known:
                yield "read", name


EVENTS = {kind.__name__: event for event, kind in entries.KINDS.items()}
EVENTS["Transitioned"] = "any other with a phase"


def found_in_code() -> dict[tuple[str, str], set[str]]:
    """Return the modules by use ("write" or "read") and entry."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        module = file.relative_to(SOURCE).with_suffix("").as_posix()
        if module == "record/entries":
            continue
        for use, name in uses(ast.parse(file.read_text()), set(EVENTS)):
            if use == "read" or module != MAKES_BUT_WRITES_NOT:
                found[use, name].add(f"`{module}`")
    return found


def table() -> str:
    """Return the table, derived from the code."""
    found = found_in_code()
    rows = [
        f"| {event} | `{name}` | {', '.join(sorted(found['write', name]))} |"
        for name, event in EVENTS.items()
    ]
    return "\n".join([HEADER, "|---|---|---|", *rows])


def test_the_table_is_that_of_the_code() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert table() in text, f"in ARCHITECTURE.md the table of entries has to be:\n{table()}"


def test_each_entry_is_written_and_read() -> None:
    found = found_in_code()
    assert not [name for name in EVENTS if not found["write", name]]
    read_by_people_alone = {"ClockChanged", "SurvivorsAsked"}
    assert {name for name in EVENTS if not found["read", name]} == read_by_people_alone


def test_a_name_in_code_is_that_of_an_entry() -> None:
    kinds = [
        each
        for each in vars(entries).values()
        if isinstance(each, type) and issubclass(each, entries.Entry)
    ]
    others = {entries.Entry, entries.Transitioned, entries.UnknownEntry}
    assert set(kinds) == {*entries.KINDS.values(), *others}
