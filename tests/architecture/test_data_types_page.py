"""docs/data-types.md is what the tables of the tests say."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / ".ci/data_types_page.py"))["page"]()
    written = (ROOT / "docs/data-types.md").read_text()
    assert written == page, "docs/data-types.md is older than its tables: make reference"
