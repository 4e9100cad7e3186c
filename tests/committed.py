"""What lies in a run's storage, read without the code that wrote it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from polytrain_plugins import CheckpointInfo, hookimpl

MANIFEST = "polytrain-manifest.json"


@dataclass
class Committed:
    """An observer that remembers which checkpoints it has been told of, the oldest first."""

    directories: list[str] = field(default_factory=list)

    @hookimpl
    def polytrain_checkpoint_committed(self, checkpoint: CheckpointInfo) -> None:
        self.directories.append(checkpoint.path.rpartition("/")[2])


def intact_checkpoints(run: Path) -> set[str]:
    """Directories of the checkpoints whose files are those that their manifest tells of."""
    return {path.parent.name for path in run.glob(f"checkpoints/*/{MANIFEST}") if is_intact(path)}


def is_intact(manifest: Path) -> bool:
    """Whether a manifest is whole, and each of its files has the content that it tells of."""
    try:
        files = json.loads(manifest.read_text())["manifest"]["files"]
    except ValueError:
        return False
    return bool(files) and all(
        (manifest.parent / file["name"]).is_file()
        and sha256(manifest.parent / file["name"]) == file["sha256"]
        for file in files
    )


def sha256(path: Path) -> str:
    """Of a file's content, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
