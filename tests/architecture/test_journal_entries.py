"""ARCHITECTURE.md draws who writes and who reads each entry of the journal, as the code does it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from polytrain.record import entries

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "core/src/polytrain"
HEADER = "| event | entry | written by | read by |"
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


def table() -> str:
    """Return the table, derived from the code."""
    events = {kind.__name__: event for event, kind in entries.KINDS.items()}
    events["Transitioned"] = "any other with a phase"
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        module = file.relative_to(SOURCE).with_suffix("").as_posix()
        if module == "record/entries":
            continue
        for use, name in uses(ast.parse(file.read_text()), set(events)):
            if use == "read" or module != MAKES_BUT_WRITES_NOT:
                found[use, name].add(f"`{module}`")
    rows = [
        f"| {event} | `{name}` | {', '.join(sorted(found['write', name]))} | "
        f"{', '.join(sorted(found['read', name]))} |"
        for name, event in events.items()
    ]
    return "\n".join([HEADER, "|---|---|---|---|", *rows])


def test_the_table_is_that_of_the_code() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert table() in text, f"in ARCHITECTURE.md the table of entries has to be:\n{table()}"


def test_each_entry_is_written_and_read() -> None:
    rows = [row.split(" | ") for row in table().splitlines()[2:]]
    assert not [row[1] for row in rows if not row[2].strip()]
    read_by_people_alone = {"`ClockChanged`", "`SurvivorsAsked`"}
    assert {row[1] for row in rows if not row[3].strip(" |")} == read_by_people_alone


def test_a_name_in_code_is_that_of_an_entry() -> None:
    kinds = [
        each
        for each in vars(entries).values()
        if isinstance(each, type) and issubclass(each, entries.Entry)
    ]
    others = {entries.Entry, entries.Transitioned, entries.UnknownEntry}
    assert set(kinds) == {*entries.KINDS.values(), *others}
