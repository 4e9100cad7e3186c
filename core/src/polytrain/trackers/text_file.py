"""A file of rows that can be cut after any step: what CSV and JSON Lines share."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from polytrain.storage.beneath import Beneath
from polytrain.trackers.tracker import Row, TrackedRun, Tracker, is_in
from polytrain_plugins import Problem


@dataclass(frozen=True)
class FileTracker(Tracker, ABC):
    """A tracker whose store is one file."""

    can_rewind: ClassVar[bool] = True
    suffix: ClassVar[str]

    path: str | None = None
    """The file; by default `metrics` with its suffix in the run's directory."""

    def problems(self) -> Iterator[Problem]:
        path: object = self.path
        if not isinstance(path, str | Path | None) or path == "":
            yield Problem(
                field=f"{type(self).__name__}.path",
                what=f"{path!r} is not a path",
                remedy=f'Give a file, for example "metrics{self.suffix}"',
            )
        elif path is not None and Path(path).is_dir():
            yield Problem(
                field=f"{type(self).__name__}.path",
                what=f"{path} is a directory",
                remedy=f'Give a file, for example "{path}/metrics{self.suffix}"',
            )

    def place_problems(self, address: str, *, is_directory: bool) -> Iterator[Problem]:
        if self.path is None and not is_directory:
            yield Problem(
                field=f"{type(self).__name__}.path",
                what=f"the run is stored in {address}, which isn't a directory",
                remedy=f'Give a file, for example {type(self).__name__}("metrics{self.suffix}")',
            )

    def resolved(self) -> Tracker:
        if self.path is None:
            return self
        return replace(self, path=str(Path(self.path).expanduser().absolute()))

    @property
    def place(self) -> str | None:
        return self.path

    def at(self, place: str | None) -> Tracker:
        return replace(self, path=place).resolved()

    def stays_in(self, directory: Path) -> bool:
        return is_in(directory, self.path or f"metrics{self.suffix}")

    def file(self, run: TrackedRun) -> Path:
        """Return the run's file.

        Raises:
            FileExistsError: it isn't of this run.
        """
        if self.path is None:
            if run.directory is None:
                raise ValueError(
                    f"{run.address} isn't a directory: give {type(self).__name__} a path"
                )
            return run.directory / f"metrics{self.suffix}"
        path = Path(self.path)
        if not run.run_id and path.exists() and path.stat().st_size:
            raise FileExistsError(f"{path} exists, and isn't of this run: give another path")
        return path


class TextFile(ABC):
    """Rows in a file. It is appended to, and replaced as a whole if earlier rows change."""

    begins: ClassVar[str]
    """How a file with rows begins: any other is somebody else's."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            FileExistsError: it doesn't begin as files of this tracker do.
        """
        self.run_id = str(path)
        self._files = Beneath(path.parent)
        self._name = path.name
        self._expect_own()
        rows = self.read()
        self.sent: int = rows[-1].step if rows else 0
        # A line that is incomplete, because its writer died, would spoil the next one.
        content = self.content()
        if content is not None and content != self.text(rows).encode():
            self.replace(rows)

    def content(self) -> bytes | None:
        """Return what the file holds; None if there is none."""
        try:
            with self._files.reading(self._name, single=True) as file:
                return file.read()
        except FileNotFoundError:
            return None

    @abstractmethod
    def read(self) -> list[Row]:
        """Return the complete rows of the file."""

    @abstractmethod
    def text(self, rows: Sequence[Row]) -> str:
        """Return the content of a file with these rows."""

    @abstractmethod
    def lines(self, rows: Sequence[Row]) -> str | None:
        """Return what to append for these rows; None if the file must be replaced."""

    def write(self, rows: Sequence[Row]) -> None:
        # Rows that are there were written by a process that died before it could note that.
        rows = [row for row in rows if row.step > self.sent]
        if not rows:
            return
        lines = self.lines(rows)
        if lines is None:
            self.replace([*self.read(), *rows])
        else:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(self._files.open(self._name, flags), "ab") as file:
                file.write(lines.encode())
        self.sent = rows[-1].step

    def rewind(self, step: int) -> None:
        if step < self.sent:
            self.replace([row for row in self.read() if row.step <= step])
            self.sent = step

    def amend(self, row: Row) -> None:
        self.replace(
            [
                replace(old, metrics={**old.metrics, **row.metrics})
                if old.step == row.step
                else old
                for old in self.read()
            ]
        )

    def finish(self, summary: Mapping[str, object], *, succeeded: bool) -> None:
        """Do nothing: the file holds rows alone."""
        return

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._files.reading(self._name) as file:
            os.fsync(file.fileno())

    def _expect_own(self) -> None:
        try:
            with self._files.reading(self._name, single=True) as file:
                begin = file.read(len(self.begins)).decode(errors="replace")
        except FileNotFoundError:
            return
        # A writer that died may have left a part of the first line.
        if not self.begins.startswith(begin):
            raise FileExistsError(
                f"{self.run_id} begins with {begin!r}, not with {self.begins!r}: it isn't a file "
                "of this tracker, and stays as it is. Give another path, or move the file away"
            )

    def replace(self, rows: Sequence[Row]) -> None:
        """Replace the file, at once: a reader sees the old or the new one."""
        with self._files.new_file(self._name) as new:
            new.file.write(self.text(rows).encode())
            new.replace()
