"""Adapts fsspec's file systems to Arrow, so that an error never looks like an empty directory.

Arrow's own handler uses fsspec's `exists`, `isdir`, `isfile` and `find`, which answer False or
nothing after any error. fsspec's `rm` treats names as patterns, and fsspec caches listings although
other processes write too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs


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
