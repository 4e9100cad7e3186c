"""Links between pages lead to files and headings that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCED = re.compile(r"^(```|~~~).*?^\1", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)


def prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text())


@cache
def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    names: set[str] = set()
    for heading in _HEADING.findall(prose(page)):
        kept = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = sum(name == kept or name.startswith(f"{kept}-") for name in names)
        names |= {kept, f"{kept}-{number}"} if number else {kept}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in _LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead
