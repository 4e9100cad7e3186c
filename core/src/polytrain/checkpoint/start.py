"""What an attempt goes on from: a checkpoint, or the very beginning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import MANIFEST_NAME, parse_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Files to load, and what was true when they were written."""

    path: str | None = None
    """Directory of the files; None at the beginning."""

    step: int = 0
    """Steps that lie behind."""

    own: bool = False
    """Whether it is a checkpoint of this run, rather than what the run was begun with."""

    positions: Mapping[str, Any] = field(default_factory=dict)
    """Data set → where to go on in it, as a manifest has it."""


def starting_point(directory: Path) -> StartingPoint:
    """Start from a directory: a checkpoint of a run, or any files that a training function knows.

    Raises:
        OSError: there is no such directory, or it can't be read.
        ValueError: its manifest is torn, or of another format.
    """
    manifest = directory / MANIFEST_NAME
    if not manifest.exists():
        # Whoever made them by hand begins with the data at the start.
        next(directory.iterdir(), None)
        return StartingPoint(path=str(directory))
    read = parse_manifest(manifest.read_text())
    return StartingPoint(path=str(directory), step=read.step, positions=read.positions)
