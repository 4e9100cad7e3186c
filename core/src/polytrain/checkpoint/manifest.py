"""The manifest of a checkpoint: its files, and what was true when it was made. Pure.

A directory is a checkpoint if and only if it holds a manifest; it is written after everything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MANIFEST_NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint."""

    name: str
    """Path relative to the checkpoint's directory, with forward slashes."""

    size: int
    """Bytes."""

    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is in a checkpoint."""

    number: int
    """Position among the run's checkpoints, from 0; a gap is one that was never committed."""

    step: int
    metrics: Mapping[str, Any]
    backend: str
    world_size: int
    generation: int
    positions: Mapping[str, Any]
    """Data set → the row that comes next, and the order that it is counted in."""

    files: tuple[StoredFile, ...]

    def to_json(self) -> str:
        """The manifest as JSON text. NaN and infinities are written as Python's json does."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)


def parse_manifest(text: str) -> Manifest:
    """Read a manifest.

    Raises:
        ValueError: if it is torn, or of another format; the message says which.
    """
    try:
        fields = json.loads(text)
        version = fields.pop("format")
        if version != FORMAT:
            raise ValueError(f"manifest format {version}, this version reads {FORMAT}")
        files = tuple(StoredFile(**file) for file in fields.pop("files"))
        return Manifest(**fields, files=files)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a manifest: {error!r}") from error


def differences(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """How the files that are there differ from those that were committed; empty when they don't.

    Args:
        manifest: what was committed.
        sizes: name → bytes of the files that are there.
    """
    found = []
    for file in manifest.files:
        size = sizes.get(file.name)
        if size is None:
            found.append(f"{file.name} is missing")
        elif size != file.size:
            found.append(f"{file.name} has {size} bytes instead of {file.size}")
    return tuple(found)
