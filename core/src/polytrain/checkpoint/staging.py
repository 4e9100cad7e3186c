"""Where a trainer puts the files of a checkpoint, for its agent to store."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

STAGING = "staging"
"""Directory of a run for this, where its storage is a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stagings:
    """The directories that a trainer may choose from."""

    scratch: Path
    """On the node."""

    near: Path | None
    """In the storage, if that is a directory: from there files needn't be copied."""

    def new(self, name: str, rank: int, *, source: Path | None = None) -> Path:
        """An empty directory for the part of one rank of a checkpoint.

        Args:
            name: of the checkpoint's directory.
            rank: whose part.
            source: where the files come from, so that they can be linked if anywhere; None for
                files that are still to be written.
        """
        root = self._root(self.scratch if source is None else source)
        staging = root / f"{name}-rank_{rank}"
        # A report that raised may have left something of the same number.
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return staging

    def _root(self, source: Path) -> Path:
        if self.near is None:
            return self.scratch
        self.near.mkdir(parents=True, exist_ok=True)
        return self.near if self.near.stat().st_dev == source.stat().st_dev else self.scratch
