"""Opens, lists and deletes files below a directory without following a link.

Anyone who can write to a shared directory can replace a file or a directory in it with a link, a
pipe or a device. Here each part of a path below the root is opened from the descriptor of its
parent, with `O_NOFOLLOW`, so no link is followed, whenever it was planted. The root itself may be
reached through links, as many home directories are.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from polytrain.storage.calls import TargetError, is_unwritable
from polytrain.storage.protocol import expect_inside
from polytrain.text.described import shown_name

logger = logging.getLogger(__name__)

_UNFINISHED = ".polytrain-unfinished-"
"""Prefix of the names of files that are still being written."""

_ENTER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags to open any file. Without `O_NONBLOCK`, opening a pipe waits for its other end."""

_DEEPEST = 100
"""Maximum levels of directories. Each takes a descriptor, and several nested calls."""

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class ForeignFileError(PermissionError):
    """A path that should be a file or a directory is a link, a pipe or something else."""


class Beneath:
    """The files below a root. Paths are relative to it, with forward slashes.

    All methods raise `ForeignFileError` if a part of the path is a link or leads upwards.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def directory(self, path: str = "", *, make: bool = False) -> Iterator[int]:
        """Yield the descriptor of a directory, for the `dir_fd` of system calls.

        Args:
            path: the directory; empty for the root.
        """
        descriptor = self._opened_root(make=make)
        try:
            above = ""
            for name in _parts(path) if path else ():
                above = f"{above}/{name}" if above else name
                with self._errors(above, descriptor, name):
                    inner = _entered(descriptor, name, make=make)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)

    def open(self, path: str, flags: int = os.O_RDONLY, *, single: bool = False) -> int:
        """Return the descriptor of a file.

        Args:
            path: the file. `O_CREAT` also makes the directories above it.
            flags: flags of `os.open`, without `O_TRUNC`.
            single: whether the file must have no other hard link, as when it is opened for
                writing: the other link could be any file of this user.
        """
        with self._parent(path, make=bool(flags & os.O_CREAT)) as (directory, name):
            return self._opened(path, directory, name, flags, single=single)

    def reading(self, path: str, *, single: bool = False) -> io.BufferedReader:
        """Open a file for reading; see `open`."""
        return os.fdopen(self.open(path, single=single), "rb")

    def read(self, path: str) -> bytes:
        """Return a file's content."""
        with self.reading(path) as file:
            return file.read()

    @contextlib.contextmanager
    def overwriting(self, path: str) -> Iterator[io.BufferedWriter]:
        """Open a file for writing, and empty it.

        Raises:
            TargetError: its disk is full or read-only; the error names the file.
        """
        try:
            with os.fdopen(self.open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.truncate()
                yield file
        except OSError as error:
            if not is_unwritable(error):
                raise
            raise TargetError(error.errno, error.strerror, self._at(path)) from error

    @contextlib.contextmanager
    def new_file(self, path: str, *, make: bool = True) -> Iterator[NewFile]:
        """Yield a file of a random name beside `path`; delete it unless it was moved there.

        Args:
            make: whether to make missing directories above it.
        """
        unfinished = f"{_UNFINISHED}{secrets.token_hex(8)}"
        with self._parent(path, make=make) as (directory, name):
            descriptor = self._opened(path, directory, unfinished, _NEW)
            new = NewFile(os.fdopen(descriptor, "wb"), directory, unfinished, name)
            try:
                yield new
            finally:
                new.file.close()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(unfinished, dir_fd=directory)

    @contextlib.contextmanager
    def moving(self, path: str, target: Beneath, new_path: str) -> Iterator[Move]:
        """Yield a file, or a directory, that can be renamed to a path below another root."""
        with self._parent(path) as (source, name), target._parent(new_path, make=True) as (to, new):
            yield Move(self, path, source, name, to, new)

    def files(
        self, below: str = "", *, expects_own: bool = False
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the paths of all files in a directory and below, with their statuses.

        Entries that are neither file nor directory, and directories that are nested too deeply, are
        left out, and named once in a warning.

        Args:
            expects_own: whether such an entry is an error instead.

        Raises:
            FileNotFoundError: there is no such directory.
        """
        yield from self._walk(self._readable(below), below, expects_own=expects_own)

    def check(self, below: str = "") -> None:
        """Check a directory before a library gets its path, and opens the files itself.

        Raises:
            ForeignFileError: an entry in it or below is neither a file nor a directory.
        """
        for _ in self.files(below, expects_own=True):
            pass

    def names(
        self, directory: str = "", *, start: str = "", single: bool = False
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the names of the files and directories in a directory, with their statuses.

        Other entries are left out, and named once in a warning. A missing directory is empty.

        Args:
            start: prefix of the names; others are ignored without a warning.
            single: whether to leave out files with more than one hard link.
        """
        with contextlib.suppress(FileNotFoundError):
            descriptor = self._readable(directory)
            try:
                yield from self._listed(descriptor, directory, start=start, single=single)
            finally:
                os.close(descriptor)

    def is_empty(self) -> bool:
        """Return whether the root has no entries, or doesn't exist."""
        try:
            descriptor = self._readable("")
        except (FileNotFoundError, NotADirectoryError):
            return True
        try:
            return not os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def status(self, path: str) -> os.stat_result:
        """Return the status of a file or a directory."""
        with self._parent(path) as (directory, name):
            return self._status(path, directory, name)

    def statuses(self, directory: str, names: Iterable[str]) -> dict[str, os.stat_result]:
        """Return the statuses of files below a directory, by their paths in it."""
        with self.directory(directory) as descriptor:
            return {
                name: self.status(f"{directory}/{name}")
                if "/" in name
                else self._status(f"{directory}/{name}", descriptor, name)
                for name in names
            }

    def delete(self, path: str) -> None:
        """Delete a file, or a link itself; no error if it doesn't exist."""
        with contextlib.suppress(FileNotFoundError), self._parent(path) as (directory, name):
            os.unlink(name, dir_fd=directory)

    def delete_below(self, path: str) -> None:
        """Delete a directory and its content, without following links; no error if it's missing."""
        with contextlib.suppress(FileNotFoundError), self._parent(path) as (directory, name):
            with self._errors(path, directory, name):
                descriptor = os.open(name, _LIST, dir_fd=directory)
            try:
                _empty(descriptor, self._too_deep(path))
            finally:
                os.close(descriptor)
            os.rmdir(name, dir_fd=directory)

    def delete_empty(self, path: str) -> None:
        """Delete a directory if it is empty."""
        with contextlib.suppress(OSError), self._parent(path) as (directory, name):
            os.rmdir(name, dir_fd=directory)

    def _opened_root(self, *, make: bool) -> int:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            return os.open(self.root, flags)
        except FileNotFoundError:
            if not make:
                raise
        os.makedirs(self.root, exist_ok=True)
        return os.open(self.root, flags)

    @contextlib.contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of a path's parent directory, and the name in it."""
        *above, name = _parts(path)
        with self.directory("/".join(above), make=make) as directory:
            yield directory, name

    def _opened(
        self, path: str, directory: int, name: str, flags: int, *, single: bool = False
    ) -> int:
        with self._errors(path, directory, name):
            descriptor = os.open(name, flags | _FILE, 0o666, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._at(path))
            single = single or flags & os.O_ACCMODE != os.O_RDONLY
            if not stat.S_ISREG(status.st_mode) or (single and status.st_nlink > 1):
                raise self._foreign(path, status)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _status(self, path: str, directory: int, name: str) -> os.stat_result:
        with self._errors(path, directory, name):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_IFMT(status.st_mode) in _KINDS:
            raise self._foreign(path, status)
        return status

    def _readable(self, path: str) -> int:
        with self.directory(path) as descriptor:
            # An `O_PATH` descriptor can't be listed.
            return os.open(".", _LIST, dir_fd=descriptor)

    def _walk(
        self, descriptor: int, path: str, *, expects_own: bool
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files below an open directory, and close it."""
        try:
            for name, status in self._listed(descriptor, path, expects_own=expects_own):
                inner = f"{path}/{name}" if path else name
                if not stat.S_ISDIR(status.st_mode):
                    if not name.startswith(_UNFINISHED):
                        yield inner, status
                    continue
                if inner.count("/") >= _DEEPEST:
                    _leave_out(self._too_deep(inner), expects_own=expects_own)
                    continue
                # Another process may delete it concurrently.
                with contextlib.suppress(FileNotFoundError):
                    with self._errors(inner, descriptor, name):
                        opened = os.open(name, _LIST, dir_fd=descriptor)
                    yield from self._walk(opened, inner, expects_own=expects_own)
        finally:
            os.close(descriptor)

    def _listed(
        self,
        descriptor: int,
        path: str,
        *,
        start: str = "",
        single: bool = False,
        expects_own: bool = False,
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the names in an open directory, with their statuses."""
        with os.scandir(descriptor) as entries:
            for entry in entries:
                if not entry.name.startswith(start):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                is_single = status.st_nlink == 1 or stat.S_ISDIR(status.st_mode)
                if stat.S_IFMT(status.st_mode) not in _KINDS and (is_single or not single):
                    yield entry.name, status
                    continue
                foreign = self._foreign(f"{path}/{entry.name}" if path else entry.name, status)
                _leave_out(foreign, expects_own=expects_own)

    @contextlib.contextmanager
    def _errors(self, path: str, directory: int, name: str) -> Iterator[None]:
        """Add the whole path to errors, and name the kind of an entry that can't be opened.

        Raises:
            ForeignFileError: it is neither a file nor a directory.
            OSError: an error of the block.
        """
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_IFMT(status.st_mode) in _KINDS:
                    raise self._foreign(path, status) from None
            error.filename = self._at(path)
            raise

    def _foreign(self, path: str, status: os.stat_result) -> ForeignFileError:
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "also a file elsewhere (a hard link)")
        remedy = ", or put a copy of its content in its place" * (status.st_nlink > 1)
        if stat.S_ISLNK(status.st_mode):
            remedy = ", or put what it leads to in its place"
        return ForeignFileError(
            f"{shown_name(self._at(path))} is {kind}: below {self.root} only files and directories "
            f"of its own are used, as others may write there. Remove it{remedy}"
        )

    def _too_deep(self, path: str) -> ForeignFileError:
        above = "/".join(path.split("/")[:3])
        return ForeignFileError(
            f"{shown_name(self._at(above))} has directories in more than {_DEEPEST} levels, of "
            "which the deeper ones aren't used, as others may write there. Remove it"
        )

    def _at(self, path: str) -> str:
        return str(self.root / path)


_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


@dataclass(frozen=True, slots=True)
class Move:
    """A file or a directory, and its target; both parent directories are open."""

    files: Beneath
    path: str
    source: int
    name: str
    target: int
    new_name: str

    def reading(self) -> io.BufferedReader:
        """Open the file for reading."""
        descriptor = self.files._opened(self.path, self.source, self.name, os.O_RDONLY)
        return os.fdopen(descriptor, "rb")

    def finish(self) -> None:
        """Rename it durably; a link itself is renamed.

        Raises:
            OSError: EXDEV: the target is on another file system.
        """
        os.rename(self.name, self.new_name, src_dir_fd=self.source, dst_dir_fd=self.target)
        _sync_names(self.target)


@dataclass(slots=True)
class NewFile:
    """A file that is being written beside its target."""

    file: io.BufferedWriter
    directory: int
    unfinished: str
    name: str

    def replace(self) -> None:
        """Move it to its target, atomically and durably; replace an existing file."""
        self._finish()
        os.rename(self.unfinished, self.name, src_dir_fd=self.directory, dst_dir_fd=self.directory)
        _sync_names(self.directory)

    def link(self) -> bool:
        """Link it to its target unless that exists; return whether it is now there.

        Raises:
            OSError: the file system has no hard links.
        """
        self._finish()
        try:
            os.link(
                self.unfinished,
                self.name,
                src_dir_fd=self.directory,
                dst_dir_fd=self.directory,
                follow_symlinks=False,
            )
        except FileExistsError:
            # An NFS client that lost the reply repeats the call, which then fails.
            status = os.stat(self.unfinished, dir_fd=self.directory, follow_symlinks=False)
            if status.st_nlink != 2:
                return False
        _sync_names(self.directory)
        return True

    def _finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


def _parts(path: str) -> list[str]:
    try:
        return expect_inside(path).split("/")
    except ValueError as error:
        raise ForeignFileError(str(error)) from error


def _entered(directory: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _ENTER, dir_fd=directory)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=directory)
    return os.open(name, _ENTER, dir_fd=directory)


def _empty(directory: int, too_deep: ForeignFileError, levels: int = _DEEPEST) -> None:
    if not levels:
        raise too_deep
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=directory)
                    continue
                inner = os.open(entry.name, _LIST, dir_fd=directory)
                try:
                    _empty(inner, too_deep, levels - 1)
                finally:
                    os.close(inner)
                os.rmdir(entry.name, dir_fd=directory)


def _sync_names(directory: int) -> None:
    """Make the names in a directory survive the machine, if the file system supports it."""
    with contextlib.suppress(OSError):
        # An `O_PATH` descriptor can't be synced.
        descriptor = os.open(".", _LIST, dir_fd=directory)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _leave_out(error: ForeignFileError, *, expects_own: bool) -> None:
    if expects_own:
        raise error
    _warn_once(str(error))


@lru_cache(maxsize=4096)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
