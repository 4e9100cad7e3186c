"""Where files lie: on this machine, or at an address such as `s3://bucket/key`.

A place is a string that means the same in every process: an absolute path, or an address. What it
takes to read from there is made where it is read, once in each process, and never crosses a fork.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from polytrain.common.close_names import close_to
from polytrain.common.data_errors import SourceError, one_line

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?]*)(.*)", re.DOTALL)
_OPTIONS = re.compile(r"\?\w+=[^/&?*]*(?:&\w+=[^/&?*]*)*\Z")
"""What may follow an address: ?region=…&scheme=http. A lone ? is part of a glob."""

_COMMON = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "http", "https")


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """A file system, and a path on it."""

    filesystem: Any
    """A `pyarrow.fs.FileSystem`."""

    path: str
    root: str
    """What precedes paths of the file system, to make them addresses again; "" for local ones."""

    base: str = ""
    """What an address names by its first part, and paths of the file system repeat."""

    options: str = ""

    @property
    def is_local(self) -> bool:
        """Whether reading ahead is the operating system's task."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)

    def address(self, path: str) -> str:
        """A path on this file system as a place that every process knows."""
        return f"{self.root}{path.removeprefix(self.base)}{self.options}"


def find(place: str) -> ResolvedPath:
    """The file system that a path or an address is about.

    Raises:
        SourceError: there is none of that kind, or it can't be reached.
    """
    matched = _ADDRESS.fullmatch(place)
    if matched is None:
        return ResolvedPath(_local(), str(Path(place).expanduser().absolute()), "")
    scheme, authority, rest = matched.groups()
    if scheme.lower() == "file":
        return ResolvedPath(_local(), _local_path(rest), "")
    options = found.group() if (found := _OPTIONS.search(rest)) else ""
    rest = rest.removesuffix(options)
    try:
        # The path stays out of what Arrow parses: it would take it for percent-encoded, and
        # refuse blanks and brackets.
        filesystem, base = _arrow(_circumstances(), scheme, authority, options)
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
    """What a file system that was made in other ones must not be used in.

    It keeps connections and threads, which a forked process would share or lack, and has asked the
    environment for servers and credentials, which a user may well have corrected since.
    """
    told = ("AWS_", "AZURE_", "GOOGLE_")
    return os.getpid(), *sorted(item for item in os.environ.items() if item[0].startswith(told))


@lru_cache(maxsize=64)
def _arrow(circumstances: Any, scheme: str, authority: str, options: str) -> tuple[Any, str]:
    filesystem, base = pafs.FileSystem.from_uri(f"{scheme}://{authority}/{options}")
    return filesystem, base


@lru_cache(maxsize=64)
def _fsspec(circumstances: Any, place: str) -> Any:
    import fsspec  # type: ignore[import-untyped]  # it ships no types

    filesystem, _ = fsspec.core.url_to_fs(place)
    return filesystem


def _local_path(rest: str) -> str:
    """The path of a file:// address, whether or not its writer has encoded it."""
    path = rest if os.path.exists(rest) else unquote(rest)
    return str(Path(path).absolute())


def _from_fsspec(place: str, scheme: str) -> ResolvedPath:
    try:
        # The whole address: what part of it names the server is the implementation's affair.
        filesystem = _fsspec(_circumstances(), place)
    except ImportError as error:
        if error.name == "fsspec":
            raise SourceError(*_unknown(place, scheme, _COMMON)) from error
        raise SourceError(
            f"{place!r} can't be read: {one_line(error)}", "Install what it names"
        ) from error
    except ValueError as error:
        from fsspec.registry import (  # type: ignore[import-untyped]
            known_implementations,
        )

        known = sorted({*_COMMON, *known_implementations})
        raise SourceError(*_unknown(place, scheme, known)) from error
    except Exception as error:
        # Every implementation has exceptions of its own.
        raise SourceError(*_unreachable(place, error)) from error
    path = filesystem._strip_protocol(place)
    whole = place if place.endswith(path) else filesystem.unstrip_protocol(path)
    root = whole.removesuffix(path)
    return ResolvedPath(pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), path, root)


def _unknown(place: str, scheme: str, known: Any) -> tuple[str, str]:
    near = close_to(scheme, known)
    return (
        f"{place!r} can't be read: nothing is known of addresses that begin with {scheme}://",
        f"Did you mean {' or '.join(f'{name}://' for name in near)}?"
        if near
        else "Use a path, s3://, gs://, abfs://, hdfs:// or what fsspec has a file system for",
    )


def _unreachable(place: str, error: BaseException) -> tuple[str, str]:
    return (
        f"{place!r} can't be reached: {one_line(error)}",
        "Check the address, and what the environment says of servers and credentials",
    )
