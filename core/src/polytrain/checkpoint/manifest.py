"""The manifest of a checkpoint: its files, and the state of the run at the commit. Pure.

A directory is a checkpoint if and only if it holds a manifest that matches its files. The manifest
is written last.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from polytrain.errors import DamagedFileError
from polytrain.storage.protocol import expect_inside
from polytrain.storage.typed_json import Count, Ranks, fitting
from polytrain.text import strict_json
from polytrain.text.described import shown_name

MANIFEST_NAME = "polytrain-manifest.json"
FORMAT = 5

_DIRECTORY = re.compile(r"checkpoint_(\d{6,})-(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class AttemptId:
    """Identifies an attempt among all attempts of a run. Later attempts compare greater."""

    token: Count
    """Fencing token of the driver's lease on the run."""

    attempt: Count
    """Number of the attempt among this driver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint."""

    name: str
    """Path relative to the checkpoint's directory, with forward slashes."""

    size: Count
    """Bytes."""

    sha256: str
    rank: Ranks
    """The rank that wrote the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint."""

    number: Count
    """Number among the run's checkpoints, from 0; numbers that were never committed are missing."""

    attempt_id: AttemptId
    step: Count
    metrics: Mapping[str, Any]
    backend: str
    written_by: str
    """A `CheckpointKind`: whether one rank or every rank wrote files."""

    versions: Mapping[str, str]
    """Distribution → version at the time of writing."""

    created: str
    """Time of the commit: ISO 8601, UTC."""

    world_size: Ranks
    positions: Mapping[str, Mapping[str, Any]]
    """Data set → the next row, and the order in which rows are counted."""

    files: tuple[StoredFile, ...]
    transform: str | None = None
    """Fingerprint of the data transform that the model was trained with; None without one.
    Fingerprints of different Python versions can't be compared."""

    virtual_workers: Ranks | None = None
    """Number of virtual workers that trained it; None without."""

    is_rescue: bool = False
    """Whether it is the state of a survivor, which nobody has reported. It is kept only while it is
    the newest, and isn't among the reported checkpoints."""

    is_left: bool = False
    """Whether a failed attempt has left it: a survivor's state, or copies. It is no progress, also
    if it is the checkpoint of a report that was being made."""

    @property
    def directory(self) -> str:
        """Name of the checkpoint's directory."""
        return directory_name(self.number, self.attempt_id)

    def to_json(self) -> str:
        """Return the manifest as strictly valid JSON."""
        body = asdict(self)
        digest = _digest(FORMAT, body)
        entry = {"format": FORMAT, "sha256": digest, "manifest": body}
        return json.dumps(strict_json.plain(entry), indent=1, allow_nan=False)


class UnknownFormatError(ValueError):
    """The manifest was written by another version of polytrain. It isn't damaged."""


def parse_manifest(text: str | bytes) -> Manifest:
    """Read a manifest.

    Raises:
        UnknownFormatError: it has another format, or a field that isn't this version's.
        ValueError: it is incomplete or was changed, or a file name in it leads out of the
            checkpoint's directory; the message says which.
    """
    fields = strict_json.loads(text)
    if not isinstance(fields, dict) or not {"format", "sha256", "manifest"} <= fields.keys():
        raise ValueError("not a manifest")
    version, body = fields["format"], fields["manifest"]
    if fields["sha256"] != _digest(version, body):
        raise ValueError("its content isn't what was written")
    if version != FORMAT:
        raise UnknownFormatError(f"manifest format {version!r}, this version reads {FORMAT}")
    try:
        manifest = fitting(Manifest, body, file=MANIFEST_NAME)
    except DamagedFileError as error:
        # It is what was written.
        raise UnknownFormatError(f"{error.field!r} {error.what}") from error
    # Anybody can write a valid hash.
    for file in manifest.files:
        expect_inside(file.name)
    return manifest


def differences(manifest: Manifest, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return how the stored files differ from the committed ones; empty if they don't.

    Args:
        sizes: name → bytes of the stored files.
    """
    found = []
    for file in manifest.files:
        size = sizes.get(file.name)
        if size is None:
            found.append(f"{shown_name(file.name)} is missing")
        elif size != file.size:
            found.append(f"{shown_name(file.name)} has {size} bytes instead of {file.size}")
    return tuple(found)


def merged(parts: Mapping[int, Sequence[StoredFile]]) -> tuple[StoredFile, ...]:
    """Merge the files of all ranks' parts into one directory.

    Args:
        parts: rank → the files that it stored.

    Raises:
        ValueError: two ranks wrote different files with the same name, or one a file and one a
            directory; the message names them.
    """
    by_name: dict[str, StoredFile] = {}
    for rank in sorted(parts):
        for file in parts[rank]:
            other = by_name.setdefault(file.name, file)
            if other.sha256 != file.sha256:
                raise ValueError(
                    f"Ranks {other.rank} and {rank} both wrote {file.name!r} into one checkpoint, "
                    "with different content. Give each rank's files names of their own, for "
                    "example with the rank in them; or set "
                    "CheckpointConfig(written_by='rank_0') to keep rank 0's files alone."
                )
    for file in by_name.values():
        for above in accumulate(file.name.split("/")[:-1], "{}/{}".format):
            if above in by_name:
                # A bucket can hold both, and no disk to which they are copied.
                raise ValueError(
                    f"Rank {by_name[above].rank} wrote a file {above!r}, and rank {file.rank} a "
                    "directory of this name, into one checkpoint. Give one of them another name."
                )
    return tuple(by_name.values())


def directory_name(number: int, attempt_id: AttemptId) -> str:
    """Return the name of a checkpoint's directory. Every attempt writes to its own."""
    return f"checkpoint_{number:06d}-{attempt_id.token}.{attempt_id.attempt}"


def parse_directory_name(name: str) -> tuple[int, AttemptId] | None:
    """Return the number and attempt in a directory's name; None for any other name."""
    found = _DIRECTORY.fullmatch(name)
    if found is None:
        return None
    number, token, attempt = map(int, found.groups())
    return number, AttemptId(token=token, attempt=attempt)


def _digest(version: Any, body: Any) -> str:
    return hashlib.sha256(json.dumps([version, body], sort_keys=True).encode()).hexdigest()
