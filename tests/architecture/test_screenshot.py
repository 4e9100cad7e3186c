"""The picture in docs/see-a-run.md is of today's page."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_picture_was_drawn_by_todays_files() -> None:
    lines = (ROOT / "docs" / "images" / "report.sha256").read_text().splitlines()
    assert lines
    changed = [
        path
        for digest, path in (line.split("  ") for line in lines)
        if hashlib.sha256((ROOT / path).read_bytes()).hexdigest() != digest
    ]
    assert not changed, f"changed since: run `make screenshot`, which needs Chromium: {changed}"
