"""What lies in a run's storage, read and verified by code that polytrain has no part in."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.object_storage import S3Server

_MANIFEST = "polytrain-manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint whose manifest is intact, and whose files are those that it tells of."""

    directory: str
    order: tuple[int, int, int]
    """Greater for newer ones."""

    step: int
    metrics: Mapping[str, Any]
    positions: Mapping[str, Any]
    files: Mapping[str, str]
    """Name → SHA-256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a driver's first attempt has begun with, according to the journal."""

    token: int
    step: int
    checkpoint: str | None
    """Name of its directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A run's storage at one moment."""

    files: Mapping[str, bytes]
    """Path below the run → content."""

    @classmethod
    def read(cls, address: str) -> Evidence:
        """Read all that is below an address or a directory."""
        if address.startswith("s3://"):
            bucket, _, prefix = address.removeprefix("s3://").partition("/")
            return cls(files=_read_bucket(bucket, f"{prefix}/"))
        root = Path(address)
        return cls(
            files={
                path.relative_to(root).as_posix(): path.read_bytes()
                for path in root.rglob("*")
                if path.is_file()
            }
        )

    @property
    def checkpoints(self) -> list[Committed]:
        """Those that are committed and intact, the oldest first."""
        directories = {path.split("/")[1] for path in self.files if path.startswith("checkpoints/")}
        found = [self._checkpoint(directory) for directory in directories]
        return sorted((c for c in found if c is not None), key=lambda c: c.order)

    @property
    def newest(self) -> Committed | None:
        """The newest of them."""
        return next(reversed(self.checkpoints), None)

    @property
    def starts(self) -> list[Start]:
        """Of each driver that has come to launch trainers."""
        found: dict[int, Start] = {}
        for entry in self._journal():
            if entry["event"] == "Launched" and entry["token"] not in found:
                start = entry["start"]
                found[entry["token"]] = Start(
                    token=entry["token"],
                    step=entry["step"],
                    checkpoint=start.rpartition("/")[2] if start else None,
                )
        return [found[token] for token in sorted(found)]

    @property
    def is_concluded(self) -> bool:
        """Whether a driver has written down that the run is over."""
        return any(entry["event"] == "Concluded" for entry in self._journal())

    @property
    def litter(self) -> list[str]:
        """Files that belong neither to a checkpoint nor to the run itself."""
        good = {checkpoint.directory for checkpoint in self.checkpoints}
        return sorted(
            path
            for path in self.files
            if path.startswith("staging/")
            or (path.startswith("checkpoints/") and path.split("/")[1] not in good)
        )

    def _checkpoint(self, directory: str) -> Committed | None:
        text = self.files.get(f"checkpoints/{directory}/{_MANIFEST}")
        if text is None:
            return None
        try:
            body = json.loads(text)
            manifest, digest = body["manifest"], body["sha256"]
        except (ValueError, KeyError):
            return None
        signed = json.dumps([body["format"], manifest], sort_keys=True)
        if _sha256(signed.encode()) != digest:
            return None
        for file in manifest["files"]:
            content = self.files.get(f"checkpoints/{directory}/{file['name']}")
            if content is None or _sha256(content) != file["sha256"]:
                return None
        attempt = manifest["attempt_id"]
        return Committed(
            directory=directory,
            order=(attempt["token"], attempt["attempt"], manifest["number"]),
            step=manifest["step"],
            metrics=manifest["metrics"],
            positions=manifest["positions"],
            files={file["name"]: file["sha256"] for file in manifest["files"]},
        )

    def _journal(self) -> list[dict[str, Any]]:
        text = b"".join(
            self.files[path] for path in sorted(self.files) if path.startswith("journal.jsonl")
        )
        entries = []
        for line in text.decode(errors="replace").splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:
                # Torn by a death.
                continue
        return entries


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_bucket(bucket: str, prefix: str) -> dict[str, bytes]:
    client = _client(os.getpid())
    found = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", ()):
            key = entry["Key"]
            # Arrow marks directories with empty objects of their names.
            if not key.endswith("/"):
                body = client.get_object(Bucket=bucket, Key=key)["Body"]
                found[key.removeprefix(prefix)] = body.read()
    return found


@cache
def _client(process: int) -> Any:
    """A client of the server that the environment names; a connection isn't for forks to share."""
    return S3Server(url=os.environ["AWS_ENDPOINT_URL"]).client()
