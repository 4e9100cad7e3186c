"""What the docs name by its full name can be imported."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = {"backends", "commands", "observers"}
"""Groups of entry points, which aren't names of Python's."""

ATTRIBUTES = {"attempt", "cause", "message", "rank", "reason", "recovery", "step"}
"""Of spans in traces."""

TAGS = {"command", "num_workers", "resumed_with.lr", "version.torch"}
"""Of tracked runs."""

NAMED = sorted(
    {
        (page.name, name)
        for page in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
        for name in re.findall(r"`(polytrain(?:_\w+)?(?:\.\w+)+)[`(]", page.read_text())
        if name.removeprefix("polytrain.") not in ENTRY_POINTS | ATTRIBUTES | TAGS
        # A module that the page itself writes.
        and not name.startswith("polytrain_jax.")
    }
)


@pytest.mark.parametrize(("page", "name"), NAMED, ids=[f"{page}-{name}" for page, name in NAMED])
def test_a_full_name_is_there(page: str, name: str) -> None:
    module, _, rest = name.partition(".")
    found = importlib.import_module(module)
    for part in rest.split("."):
        module = f"{module}.{part}"
        if not hasattr(found, part):
            importlib.import_module(module)
        found = getattr(found, part)
