"""Every module says what its job is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

MODULES = sorted(
    path
    for folder in ("*/src", "tests", "examples", ".ci")
    for path in ROOT.glob(f"{folder}/**/*.py")
    if "__pycache__" not in path.parts
)


_BEGINS = re.compile(r'(\s|#.*\n)*"""\s*[^\s"]')
"""A docstring that isn't empty, after comments. To parse every module would take seconds."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_says_its_job() -> None:
    assert len({path.parts[len(ROOT.parts)] for path in MODULES}) >= 7
    texts = {name(path): path.read_text() for path in MODULES}
    silent = [path for path, text in texts.items() if text and not _BEGINS.match(text)]
    assert silent == []
