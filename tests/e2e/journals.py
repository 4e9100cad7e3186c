"""Reading a run's journal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def journal(run: str | Path, event: str | None = None) -> list[dict[str, Any]]:
    """The lines of the journal in a run's directory; only those of one event, if it is given."""
    lines = map(json.loads, Path(run, "journal.jsonl").read_text().splitlines())
    return [line for line in lines if event in (None, line["event"])]
