"""Finds the file system of a path on this machine, or of an address such as `s3://bucket/key`.

A place is a string that means the same in every process: an absolute path, or an address. Each
process makes its own file system for it; none crosses a fork.

Those of fsspec get a handler with which an error never looks like an empty directory. Arrow's own
uses fsspec's `exists`, `isdir`, `isfile` and `find`, which answer False or nothing after any error.
fsspec's `rm` treats names as patterns, and fsspec caches listings although other processes write.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from polytrain.config.constraints import path_or_address
from polytrain.data_errors import SourceError, one_line
from polytrain.storage.location import OPTIONS, local_path
from polytrain_plugins.close_names import close_to

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?]*)(.*)", re.DOTALL)
_GOOGLE_LIMIT = "retry_limit_seconds="
_COMMON = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "http", "https")


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """A file system, and a path on it."""

    filesystem: Any
    """A `pyarrow.fs.FileSystem`."""

    path: str
    root: str
    """Prefix that turns a path of the file system into an address; "" if local."""

    base: str = ""
    """The part that both addresses and paths of the file system contain, such as the bucket."""

    options: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it is local: then the operating system reads ahead."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)

    def address(self, path: str) -> str:
        """Return a path on this file system as a path or address that every process understands."""
        return f"{self.root}{path.removeprefix(self.base)}{self.options}"


def find(place: str, *, is_retried: bool = False) -> ResolvedPath:
    """Return the file system of a path or an address.

    Args:
        is_retried: whether the caller repeats calls that fail, so that Arrow needn't for long.

    Raises:
        SourceError: it is unknown, or can't be reached.
    """
    matched = _ADDRESS.fullmatch(place)
    if not place.strip() or (matched and not any(matched.groups()[1:])):
        raise SourceError(f"the path is empty: {place!r}", "Pass the path or address of the data")
    if matched is None:
        for what, remedy in path_or_address(place):
            raise SourceError(what, remedy)
        return ResolvedPath(_local(), str(Path(place).expanduser().absolute()), "")
    scheme, authority, rest = matched.groups()
    if scheme.lower() == "file":
        return ResolvedPath(_local(), str(Path(local_path(f"file://{rest}")).absolute()), "")
    options = found.group() if (found := OPTIONS.search(rest)) else ""
    rest = rest.removesuffix(options)
    try:
        # Arrow doesn't get the path: it would decode percent signs, and reject blanks and
        # brackets.
        found_by = _arrow_for_retries if is_retried else _arrow
        filesystem, base = found_by(_circumstances(), scheme, authority, options)
    except pa.ArrowInvalid as error:
        if "nrecognized filesystem" not in str(error):
            raise SourceError(*_unreachable(place, error)) from error
        return _from_fsspec(place, scheme)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(*_unreachable(place, error)) from error
    base = base.rstrip("/")
    path = f"{base}/{rest.lstrip('/')}".rstrip("/")
    return ResolvedPath(filesystem, path, f"{scheme}://{authority}", base, options)


def _local() -> Any:
    return pafs.LocalFileSystem()


def _circumstances() -> Any:
    """Return the process and variables that a file system depends on: part of the cache's key.

    A file system has connections and threads, which a forked process would share or lack. It reads
    servers and credentials from the environment, which the user may have changed since.
    """
    names = ("AWS_", "AZURE_", "GOOGLE_")
    return os.getpid(), *sorted(item for item in os.environ.items() if item[0].startswith(names))


@lru_cache(maxsize=64)
def _arrow(circumstances: Any, scheme: str, authority: str, options: str) -> tuple[Any, str]:
    if scheme in ("gs", "gcs") and _GOOGLE_LIMIT not in options:
        # Google's client by itself tries each call for 15 minutes and says nothing, also if there
        # are no credentials. Arrow's tries each of S3 for about as long as this.
        options = f"{options}{'&' if options else '?'}{_GOOGLE_LIMIT}6"
    filesystem, base = pafs.FileSystem.from_uri(f"{scheme}://{authority}/{options}")
    return filesystem, base


@lru_cache(maxsize=64)
def _arrow_for_retries(
    circumstances: Any, scheme: str, authority: str, options: str
) -> tuple[Any, str]:
    filesystem, base = _arrow(circumstances, scheme, authority, options)
    if filesystem.type_name == "s3":
        # Found by its address, it tries each call for six seconds. A copy does as
        # `pyarrow.fs.S3FileSystem` says: three tries within a second.
        filesystem = pickle.loads(pickle.dumps(filesystem))
    return filesystem, base


@lru_cache(maxsize=64)
def _fsspec(circumstances: Any, place: str) -> Any:
    import fsspec  # type: ignore[import-untyped]  # it ships no types

    return fsspec.core.url_to_fs(place)


def _from_fsspec(place: str, scheme: str) -> ResolvedPath:
    try:
        # Pass the whole address: only the implementation knows which part names the server.
        filesystem, path = _fsspec(_circumstances(), place)
    except ImportError as error:
        if error.name == "fsspec":
            raise SourceError(*_unknown(place, scheme, _COMMON)) from error
        raise SourceError(
            f"{place!r} can't be read: {one_line(error)}", "Install the package that it names"
        ) from error
    except ValueError as error:
        from fsspec.registry import (  # type: ignore[import-untyped]
            known_implementations,
        )

        known = sorted({*_COMMON, *known_implementations})
        raise SourceError(*_unknown(place, scheme, known)) from error
    except Exception as error:
        # Every implementation has its own exceptions.
        raise SourceError(*_unreachable(place, error)) from error
    whole = place if place.endswith(path) else filesystem.unstrip_protocol(path)
    root = whole.removesuffix(path)
    return ResolvedPath(pafs.PyFileSystem(FsspecHandler(filesystem)), path, root)


def _unknown(place: str, scheme: str, known: Any) -> tuple[str, str]:
    near = " or ".join(f"{name}://" for name in close_to(scheme, known))
    meant = f"Did you mean {near}? " if near else ""
    return (
        f"{place!r}: the scheme {scheme}:// is unknown",
        f"{meant}Use a path, s3://, gs://, abfs://, hdfs:// or an address that fsspec knows",
    )


def _unreachable(place: str, error: BaseException) -> tuple[str, str]:
    return (
        f"{place!r} can't be reached: {one_line(error)}",
        "Check the address, and the servers and credentials in the environment",
    )


class FsspecHandler(pafs.FSSpecHandler):  # type: ignore[misc]  # pyarrow ships no types
    """The operations for a run's storage and data sets, with errors distinct from absence."""

    def get_file_info(self, paths: list[str]) -> list[Any]:
        # A cached listing may describe an earlier version of the file.
        self.fs.invalidate_cache()
        return list(super().get_file_info(paths))

    def get_file_info_selector(self, selector: Any) -> list[Any]:
        self.fs.invalidate_cache()
        found = self._below(selector.base_dir, recursive=selector.recursive)
        return [_file_info(path, info) for path, info in found]

    def open_input_stream(self, path: str) -> Any:
        self.fs.invalidate_cache()
        return pa.PythonFile(self.fs.open(path, mode="rb"), mode="r")

    def delete_file(self, path: str) -> None:
        self.fs.rm_file(path)

    def delete_dir(self, path: str) -> None:
        self.fs.invalidate_cache()
        directories = [path]
        for inner, info in self._below(path):
            if info["type"] == "directory":
                directories.append(inner)
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm_file(inner)
        for directory in reversed(directories):
            # Object storage may have no directories.
            with contextlib.suppress(OSError, NotImplementedError):
                self.fs.rmdir(directory)

    def _below(self, path: str, *, recursive: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield all entries in a directory and below, each directory before its content."""
        pending = [path.rstrip("/")]
        while pending:
            directory = pending.pop()
            try:
                entries = self.fs.ls(directory, detail=True)
            except FileNotFoundError:
                continue
            for info in entries:
                *above, name = info["name"].rstrip("/").split("/")
                # Skip the entry of the directory itself, as object storage lists it.
                if "/".join(above).strip("/") != directory.strip("/"):
                    continue
                # A link on a local file system: its target isn't the run's.
                if info.get("islink"):
                    continue
                inner = f"{directory}/{name}"
                yield inner, info
                if recursive and info["type"] == "directory":
                    pending.append(inner)


def _file_info(path: str, info: Mapping[str, Any]) -> Any:
    kinds = {"file": pafs.FileType.File, "directory": pafs.FileType.Directory}
    kind = kinds.get(info["type"], pafs.FileType.Unknown)
    # Some implementations give a directory a size.
    size = None if kind == pafs.FileType.Directory else info["size"]
    return pafs.FileInfo(path, kind, size=size, mtime=info.get("mtime"))
