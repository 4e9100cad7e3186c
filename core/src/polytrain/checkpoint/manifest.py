"""The manifest of a checkpoint: its files, and what was true when it was made. Pure.

A directory is a checkpoint if and only if it holds a manifest that tells of the files in it; the
manifest is written after everything else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MANIFEST_NAME = "polytrain-manifest.json"
FORMAT = 3

_DIRECTORY = re.compile(r"checkpoint_(\d{6,})-(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AttemptId:
    """One attempt of workers among all that a run has ever had. Later ones compare greater."""

    token: int
    """Number of the driver's lease on the run."""

    attempt: int
    """Of that driver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint."""

    name: str
    """Path relative to the checkpoint's directory, with forward slashes."""

    size: int
    """Bytes."""

    sha256: str
    rank: int
    """Who wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is in a checkpoint."""

    number: int
    """Position among the run's checkpoints, from 0; a gap is one that was never committed."""

    attempt_id: AttemptId
    step: int
    metrics: Mapping[str, Any]
    backend: str
    written_by: str
    """A `CheckpointKind`: who wrote it, one rank or every one its part."""

    versions: Mapping[str, str]
    """Distribution → version, of what it was written with."""

    created: str
    """When it was committed: ISO 8601, UTC."""

    world_size: int
    positions: Mapping[str, Any]
    """Data set → the row that comes next, and the order that it is counted in."""

    files: tuple[StoredFile, ...]

    @property
    def directory(self) -> str:
        """Name of the checkpoint's directory."""
        return directory_name(self.number, self.attempt_id)

    def to_json(self) -> str:
        """The manifest as JSON text. NaN and infinities are written as Python's json does."""
        body = asdict(self)
        digest = _digest(FORMAT, body)
        return json.dumps({"format": FORMAT, "sha256": digest, "manifest": body}, indent=1)


class UnknownFormatError(ValueError):
    """A manifest that another version of polytrain has written: nothing is wrong with it."""


def parse_manifest(text: str | bytes) -> Manifest:
    """Read a manifest.

    Raises:
        UnknownFormatError: if it is of another format.
        ValueError: if it is torn or has been changed; the message says.
    """
    try:
        fields = json.loads(text)
        version, body = fields["format"], fields.get("manifest")
        if fields["sha256"] != _digest(version, body):
            raise ValueError("its content isn't what was written")
        if version != FORMAT:
            raise UnknownFormatError(f"manifest format {version}, this version reads {FORMAT}")
        files = tuple(StoredFile(**file) for file in body.pop("files"))
        attempt_id = AttemptId(**body.pop("attempt_id"))
        return Manifest(**body, attempt_id=attempt_id, files=files)
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


def merged(parts: Mapping[int, Sequence[StoredFile]]) -> tuple[StoredFile, ...]:
    """The files of all ranks' parts as those of one directory.

    Args:
        parts: rank → files that it stored.

    Raises:
        ValueError: two ranks wrote different files of one name; the message names them.
    """
    by_name: dict[str, StoredFile] = {}
    for rank in sorted(parts):
        for file in parts[rank]:
            other = by_name.setdefault(file.name, file)
            if other.sha256 != file.sha256:
                raise ValueError(
                    f"Ranks {other.rank} and {rank} both wrote {file.name!r} into one checkpoint, "
                    "with different content. Give each rank's files names of their own, for "
                    "example with the rank in them."
                )
    return tuple(by_name.values())


def directory_name(number: int, attempt_id: AttemptId) -> str:
    """The directory of a checkpoint. No two attempts ever write to the same one."""
    return f"checkpoint_{number:06d}-{attempt_id.token}.{attempt_id.attempt}"


def parse_directory_name(name: str) -> tuple[int, AttemptId] | None:
    """Number and attempt of a checkpoint's directory; None if the name isn't one's."""
    found = _DIRECTORY.fullmatch(name)
    if found is None:
        return None
    number, token, attempt = map(int, found.groups())
    return number, AttemptId(token=token, attempt=attempt)


def _digest(version: Any, body: Any) -> str:
    return hashlib.sha256(json.dumps([version, body], sort_keys=True).encode()).hexdigest()
