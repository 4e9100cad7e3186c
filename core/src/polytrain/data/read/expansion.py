"""Finds the files that a path, a directory or a glob stands for, and the columns that the names of
directories give.

`pyarrow.dataset` isn't used for that: it ignores files that it can't name, and reads backups and
links twice.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from polytrain.data.read.formats import (
    ending_of,
    format_inside,
    format_of,
    way_to_pass,
    without_compression,
)
from polytrain.data_errors import SourceError, one_line
from polytrain.storage.filesystems import ResolvedPath, find
from polytrain.storage.location import OPTIONS
from polytrain_plugins.close_names import did_you_mean_file

_MAGIC = re.compile(r"[*?[]")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_JOURNAL = "journal.jsonl"
"""A file that only the directory of a run has."""

_TABLE_FORMATS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
"""Directories of table formats, which keep invalid files beside valid ones."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a data set."""

    place: str
    partition: Mapping[str, str | None] = field(default_factory=dict)
    """The columns in the names of the directories above: year=2024 → {"year": "2024"}."""

    content: str | None = None
    """The format by the first bytes, if the name has no ending, as Hadoop's part-00000."""

    @property
    def format(self) -> str:
        """The format: "parquet", "csv", "tsv", "jsonl" or "ipc"."""
        found = self.known_format
        if found is None:
            raise SourceError(
                f"{self.place!r} is neither .parquet nor .csv nor .tsv nor .jsonl nor .arrow",
                way_to_pass(self.place, "Convert it to one of them"),
            )
        return found

    @property
    def known_format(self) -> str | None:
        """The format; None if it is another than those."""
        return format_of(self.place) or self.content


def expand(place: str, *, listed: bool = False) -> list[FoundFile]:
    """The files that a path, a directory or a glob stands for, in the order of their names.

    Directories are searched all the way down; names that begin with _ or a dot are left out. A file
    that several links lead to is there once.

    Args:
        listed: it is one of a list: then all directories of a file may give columns, as in Arrow.

    Raises:
        SourceError: there are none, or they can't be looked for.
    """
    where = find(place)
    try:
        info = where.filesystem.get_file_info(where.path)
        if info.type == pafs.FileType.Directory:
            paths = _below(where, where.path)
            paths = _once(where.path, paths) if where.is_local else sorted(paths)
            found = [_found(where, path, where.path) for path in paths]
        elif info.type == pafs.FileType.File:
            above = "" if listed else where.path.rpartition("/")[0]
            return [_found(where, where.path, above)]
        elif _MAGIC.search(where.path):
            found = [_found(where, path, _fixed_part(where.path)) for path in _matching(where)]
        else:
            found = []
    except SourceError:
        raise
    except Exception as error:
        # Every implementation of fsspec has exceptions of its own.
        raise SourceError(
            f"{place!r} can't be looked at: {one_line(error)}",
            "Check the path or address, and that you may read it",
        ) from error
    data = [file for file in _without_runs(found) if file.known_format]
    if not data:
        raise SourceError(*_nothing_found(place, found, info.type))
    _check_one_format(place, data)
    _check_no_copies(place, data)
    return data


def partition_types(files: Sequence[FoundFile]) -> dict[str, pa.DataType]:
    """The types of the columns in the names of directories: whole numbers or strings."""
    values: dict[str, set[str]] = {}
    for file in files:
        for name, value in file.partition.items():
            values.setdefault(name, set())
            if value is not None:
                values[name].add(value)
    return {name: _type_of(found) for name, found in values.items()}


def _type_of(values: set[str]) -> pa.DataType:
    if not values or not all(re.fullmatch(r"[+-]?[0-9]{1,18}", value) for value in values):
        return pa.string()
    # The types that Arrow finds, which takes no larger numbers than these.
    small = all(-(2**31) <= int(value) < 2**31 for value in values)
    return pa.int32() if small else pa.int64()


def _check_one_format(place: str, files: Sequence[FoundFile]) -> None:
    """Refuse files of two formats, which may well be the same rows twice."""
    firsts = {file.format: file.place for file in reversed(files)}
    if len(firsts) > 1:
        raise SourceError(
            f"{place!r} stands for files of different formats, such as "
            + " and ".join(map(repr, sorted(firsts.values()))),
            "Name those that are meant, as with a glob that ends with *.parquet, or pass a list",
        )


def _check_no_copies(place: str, files: Sequence[FoundFile]) -> None:
    """Refuse a file beside its compressed copy."""
    found: dict[str, str] = {}
    for file in files:
        name = without_compression(file.place)
        if name in found:
            raise SourceError(
                f"{place!r} stands for {found[name]!r} and {file.place!r}, which may well be the "
                "same rows twice",
                "Remove one of them, or pass a list of the files that are meant",
            )
        found[name] = file.place


def _without_runs(files: Sequence[FoundFile]) -> list[FoundFile]:
    """Leave out runs that are stored beside the data."""
    ending = f"/{_JOURNAL}"
    runs = tuple(file.place.removesuffix(_JOURNAL) for file in files if file.place.endswith(ending))
    return [file for file in files if not file.place.startswith(runs)]


def _found(where: ResolvedPath, path: str, above: str) -> FoundFile:
    if where.root and OPTIONS.search(path):
        raise SourceError(
            f"the name {path!r} can't be distinguished from an address with options",
            "Rename it: without a question mark",
        )
    place = where.address(path)
    content = None if ending_of(place) else format_inside(where, path)
    return FoundFile(place, _partition(path.removeprefix(above)), content)


def _partition(relative: str) -> dict[str, str | None]:
    pairs = (part.split("=", 1) for part in relative.split("/")[:-1] if "=" in part)
    return {
        unquote(name): None if value == _NO_VALUE else unquote(value)
        for name, value in pairs
        if name
    }


def _nothing_found(place: str, others: list[FoundFile], kind: Any) -> tuple[str, str]:
    if others:
        return (
            f"none of the {len(others)} files that {place!r} stands for is .parquet, .csv, .tsv, "
            f".jsonl or .arrow, such as {others[0].place!r}",
            way_to_pass(others[0].place, "Convert them to one of these"),
        )
    if kind == pafs.FileType.Directory:
        return f"the directory {place!r} has no data files", "Check the path"
    if "://" in place:
        return f"no file matches {place!r}", "Check the address, and whether you may list its files"
    meant = did_you_mean_file(Path(place))
    return f"no file matches {place!r}", f"{meant}Check the path; globs are allowed"


def _below(where: ResolvedPath, directory: str) -> list[str]:
    """The visible files in a directory and in those below it."""
    if where.is_local:
        return list(_local_files_below(directory))
    found = []
    for info in where.filesystem.get_file_info(pafs.FileSelector(directory, recursive=True)):
        parts = info.path[len(directory) :].strip("/").split("/")
        _check_no_table_format(directory, parts)
        if info.type == pafs.FileType.File and not any(map(_is_hidden, parts)):
            found.append(info.path)
    return found


def _local_files_below(directory: str) -> Iterator[str]:
    """Local files below a directory, each real directory once; a path without links wins."""
    visited: set[str] = set()
    pending, links = [directory], deque[str]()
    while pending or links:
        path = pending.pop() if pending else links.popleft()
        real = os.path.realpath(path)
        if real in visited:
            continue
        visited.add(real)
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        _check_no_table_format(path, [entry.name for entry in found])
        for entry in found:
            if _is_hidden(entry.name):
                continue
            if entry.is_dir():
                (links if entry.is_symlink() else pending).append(entry.path)
            elif entry.is_file():
                yield entry.path
            else:
                _check_link(entry.path)


def _check_link(path: str) -> None:
    """Refuse a link that should lead to a data file and leads to nothing."""
    if os.path.islink(path) and not os.path.exists(path) and format_of(path):
        raise FileNotFoundError(f"the link {path!r} leads to no file")


def _once(base: str, paths: Iterable[str]) -> list[str]:
    """Local files in the order of their names, each real file once."""
    real_base = os.path.realpath(base or "/").rstrip("/")
    real_directory = lru_cache(maxsize=None)(os.path.realpath)
    files: dict[str, str] = {}
    links = []
    # Of two paths by links, the shorter one wins.
    for path in sorted(paths, key=lambda path: (path.count("/"), path)):
        directory, name = os.path.split(path)
        if os.path.islink(path):
            links.append(path)
            continue
        real = f"{real_directory(directory)}/{name}"
        is_straight = real == real_base + path[len(base) :]
        if real not in files or is_straight:
            files[real] = path
    return sorted(
        [*files.values(), *(link for link in links if os.path.realpath(link) not in files)]
    )


def _check_no_table_format(directory: str, names: Iterable[str]) -> None:
    """Refuse the files of a table whose log says which of them are valid."""
    for name in names:
        kind = "Iceberg" if name.endswith(".metadata.json") else _TABLE_FORMATS.get(name)
        if kind is not None:
            raise SourceError(
                f"{directory!r} is part of a table in {kind}'s format, among whose files are some "
                "that hold removed rows",
                "Pass what its library takes for valid, as a list of files or a table (for Delta, "
                "DeltaTable(path).to_pyarrow_dataset())",
            )


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _fixed_part(pattern: str) -> str:
    """The directory that a glob begins in."""
    start = _MAGIC.search(pattern)
    return pattern[: start.start()].rpartition("/")[0] if start else pattern


def _matching(where: ResolvedPath) -> list[str]:
    """The files that a glob matches, and those below the directories that it matches."""
    base = _fixed_part(where.path)
    parts = where.path[len(base) :].strip("/").split("/")
    files: set[str] = set()
    for path, is_directory in _walk(where, base or "/", parts, frozenset()):
        files.update(_below(where, path) if is_directory else [path])
    return _once(base, files) if where.is_local else sorted(files)


def _walk(
    where: ResolvedPath, directory: str, parts: list[str], above: frozenset[str]
) -> Iterator[tuple[str, bool]]:
    """Walk through the entries of a directory that match these parts of a glob, level by level.

    Args:
        above: directories that ** has come through; links back to them are not followed.

    Yields:
        A path, and whether it is a directory's.
    """
    part, rest = parts[0], parts[1:]
    if part == "**":
        if where.is_local:
            real = os.path.realpath(directory)
            if real in above:
                return
            above |= {real}
        if rest:
            yield from _walk(where, directory, rest, above)
    found = _local_entries(directory) if where.is_local else _entries(where, directory)
    _check_no_table_format(directory, (os.path.basename(path) for path, _ in found))
    for path, is_directory in found:
        name = os.path.basename(path)
        if part == "**":
            if not _is_hidden(name):
                if is_directory:
                    yield from _walk(where, path, parts, above)
                elif not rest:
                    yield path, False
        elif _matches(name, part) and (is_directory or not rest):
            if rest:
                yield from _walk(where, path, rest, above)
            else:
                if where.is_local and not is_directory:
                    _check_link(path)
                yield path, is_directory


def _entries(where: ResolvedPath, directory: str) -> list[tuple[str, bool]]:
    """List a directory, if it is there: paths, and whether they are directories."""
    selector = pafs.FileSelector(directory, allow_not_found=True)
    return [
        (info.path.rstrip("/"), info.type == pafs.FileType.Directory)
        for info in where.filesystem.get_file_info(selector)
    ]


def _local_entries(directory: str) -> list[tuple[str, bool]]:
    """List a local directory; links to nothing count as files."""
    try:
        with os.scandir(directory) as entries:
            return [(entry.path, entry.is_dir()) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _matches(name: str, part: str) -> bool:
    # As in a shell, hidden files match hidden patterns alone.
    return fnmatch.fnmatchcase(name, part) and (not _is_hidden(name) or _is_hidden(part))
