"""Which files a path, a directory or a glob stands for, and what their directories' names tell."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from polytrain.common.data_errors import SourceError, one_line
from polytrain.storage.filesystems import ResolvedPath, find

_MAGIC = re.compile(r"[*?[]")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv"}


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of a data set."""

    place: str
    partition: Mapping[str, str | None] = field(default_factory=dict)
    """What the directories above it are named for: year=2024 → {"year": "2024"}."""

    @property
    def format(self) -> str:
        """ "parquet" or "csv"."""
        found = format_of(self.place)
        if found is None:
            raise SourceError(
                f"{self.place!r} is neither .parquet nor .csv", "Convert it to one of the two"
            )
        return found


def format_of(place: str) -> str | None:
    """The format that a file's name promises; compressed CSV files have two endings."""
    name = place.split("?")[0] if "://" in place else place
    endings = [f".{ending}" for ending in name.rpartition("/")[2].lower().split(".")[1:]]
    return next((_FORMATS[ending] for ending in reversed(endings) if ending in _FORMATS), None)


def expand(place: str, *, listed: bool = False) -> list[FoundFile]:
    """The files that a path, a directory or a glob stands for, in the order of their names.

    Directories are searched all the way down, without what begins with _ or a dot.

    Args:
        place: a path or an address.
        listed: it is one of a list, all of whose directories tell values, as in Arrow.

    Raises:
        SourceError: there are none, or they can't be looked for.
    """
    where = find(place)
    try:
        info = where.filesystem.get_file_info(where.path)
        if info.type == pafs.FileType.Directory:
            found = [_found(where, path, where.path) for path in _below(where, where.path)]
        elif info.type == pafs.FileType.File:
            above = "" if listed else where.path.rpartition("/")[0]
            return [_found(where, where.path, above)]
        elif _MAGIC.search(where.path):
            found = [_found(where, path, _fixed_part(where.path)) for path in _matching(where)]
        else:
            found = []
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(
            f"{place!r} can't be looked at: {one_line(error)}",
            "Check the path or address, and that you may read it",
        ) from error
    data = [file for file in found if format_of(file.place)]
    if not data:
        raise SourceError(*_nothing_found(place, found, info.type))
    return data


def partition_types(files: Sequence[FoundFile]) -> dict[str, pa.DataType]:
    """The types of the columns that directories' names give: whole numbers or strings."""
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
    # What Arrow finds, except that it knows no larger numbers than these.
    small = all(-(2**31) <= int(value) < 2**31 for value in values)
    return pa.int32() if small else pa.int64()


def _found(where: ResolvedPath, path: str, above: str) -> FoundFile:
    return FoundFile(where.address(path), _partition(path.removeprefix(above)))


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
            f"none of the {len(others)} files that {place!r} stands for is .parquet or .csv, "
            f"such as {others[0].place!r}",
            "Convert them to one of the two",
        )
    if kind == pafs.FileType.Directory:
        return f"the directory {place!r} has no data files", "Check the path"
    if "://" in place:
        return f"no file matches {place!r}", "Check the address, and whether you may list its files"
    return f"no file matches {place!r}", "Check the path; globs are allowed"


def _below(where: ResolvedPath, directory: str) -> list[str]:
    """The visible files in a directory and in those below it."""
    selector = pafs.FileSelector(directory, recursive=True)
    start = len(directory)
    return sorted(
        info.path
        for info in where.filesystem.get_file_info(selector)
        if info.type == pafs.FileType.File
        and not any(map(_is_hidden, info.path[start:].strip("/").split("/")))
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
    for info in _walk(where.filesystem, base or "/", parts):
        if info.type == pafs.FileType.File:
            files.add(info.path)
        else:
            files.update(_below(where, info.path))
    return sorted(files)


def _walk(filesystem: Any, directory: str, parts: list[str]) -> Iterator[Any]:
    """What is in a directory and matches these parts of a glob, level by level."""
    part, rest = parts[0], parts[1:]
    if part == "**" and rest:
        yield from _walk(filesystem, directory, rest)
    selector = pafs.FileSelector(directory, allow_not_found=True)
    for info in filesystem.get_file_info(selector):
        name = info.path.rstrip("/").rpartition("/")[2]
        is_directory = info.type == pafs.FileType.Directory
        if part == "**":
            if not _is_hidden(name):
                if is_directory:
                    yield from _walk(filesystem, info.path, parts)
                elif not rest:
                    yield info
        elif _matches(name, part) and (is_directory or not rest):
            if rest:
                yield from _walk(filesystem, info.path, rest)
            else:
                yield info


def _matches(name: str, part: str) -> bool:
    # As in a shell, what is hidden has to be asked for.
    return bool(_pattern(part).fullmatch(name)) and (not _is_hidden(name) or _is_hidden(part))


@lru_cache(maxsize=64)
def _pattern(part: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(part))
