"""The files of the model that predicts, for processes on any node."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.manifest import MANIFEST_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A checkpoint, or the content of its files if other nodes may lack its directory."""

    checkpoint: Checkpoint
    content: Mapping[str, bytes] | None = None

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Yield the files as a local directory.

        Raises:
            CheckpointError: the checkpoint is missing, or differs from what was committed.
        """
        path = Path(self.checkpoint.path)
        if self.content is None or path.is_dir():
            with self.checkpoint.as_directory() as found:
                yield Path(found)
            return
        with tempfile.TemporaryDirectory(prefix="polytrain-model-") as made:
            for name, content in self.content.items():
                file = Path(made, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            yield Path(made)

    def for_other_nodes(self) -> ModelFiles:
        """Return it with the content of the files, if their directory is local."""
        path = Path(self.checkpoint.path)
        if self.checkpoint.filesystem is not None or not path.is_dir():
            return self
        with self.checkpoint.as_directory() as found:
            content = {name: file.read_bytes() for name, file in _files(Path(found))}
        return replace(self, content=content)


def digest_of(directory: Path) -> str:
    """Return the digest of a model's files, which ignores their place and time of commit."""
    digest = hashlib.sha256()
    for name, file in _files(directory):
        with file.open("rb") as content:
            of_file = hashlib.file_digest(content, "sha256").hexdigest()
        digest.update(f"{name}\0{of_file}\n".encode())
    return digest.hexdigest()


def _files(directory: Path) -> list[tuple[str, Path]]:
    files = (file for file in sorted(directory.rglob("*")) if file.is_file())
    named = ((file.relative_to(directory).as_posix(), file) for file in files)
    return [(name, file) for name, file in named if name != MANIFEST_NAME]
