"""Which version of a file it was that was described: files must stay as they are during a run."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow.fs as pafs

from polytrain.data_errors import ReadError
from polytrain.storage.filesystems import ResolvedPath


class FileVersion(NamedTuple):
    """A file's size and time of modification; None where its storage doesn't tell."""

    size: int | None = None
    modified_ns: int | None = None


UNKNOWN = FileVersion()


def version_of(place: ResolvedPath) -> FileVersion:
    """The version of a file that is there now.

    Raises:
        FileNotFoundError: none is.
    """
    info = place.filesystem.get_file_info(place.path)
    if info.type == pafs.FileType.NotFound:
        raise FileNotFoundError("there is no such file")
    return FileVersion(info.size, info.mtime_ns)


def check_unchanged(where: str, then: FileVersion, now: FileVersion) -> None:
    """Refuse to read another version than the one that was described.

    Raises:
        ReadError: it is another one.
    """
    for what, was, is_ in (
        ("its size was {} bytes, and is {}", then.size, now.size),
        ("it was modified", then.modified_ns, now.modified_ns),
    ):
        if None not in (was, is_) and was != is_:
            raise ReadError(
                f"{where} has changed since the run began: {what.format(was, is_)}. Give a run "
                "files that stay as they are"
            )
