"""What hosts are made of: namespaces, control groups and mounts. Says why a machine has none."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from polytrain.testing.processes import eventually

_ROOTS = {
    Path("/sys/fs/cgroup/freezer"): "cgroup.procs",
    # Version 2, alone or beside version 1.
    Path("/sys/fs/cgroup"): "cgroup.subtree_control",
    Path("/sys/fs/cgroup/unified"): "cgroup.subtree_control",
}


def freezer_roots() -> list[Path]:
    """Where control groups that can be frozen are made, of version 1 and of version 2."""
    return [root for root, file in _ROOTS.items() if os.access(root / file, os.W_OK)]


class Freezer:
    """The control group of one host. Its processes move into it by themselves."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.members = directory / "cgroup.procs"
        self._directory = directory
        self._is_v1 = (directory / "freezer.state").exists()

    def freeze(self) -> None:
        """Stop all processes, and return when they stand still."""
        self._write("FROZEN", "1")
        if not eventually(self._is_frozen):
            raise TimeoutError(f"{self._directory} isn't frozen after 30 s")

    def thaw(self) -> None:
        # A host that is gone has nothing to thaw.
        with suppress(FileNotFoundError):
            self._write("THAWED", "0")

    def _write(self, v1: str, v2: str) -> None:
        if self._is_v1:
            (self._directory / "freezer.state").write_text(v1)
        else:
            (self._directory / "cgroup.freeze").write_text(v2)

    def _is_frozen(self) -> bool:
        if self._is_v1:
            return (self._directory / "freezer.state").read_text().strip() == "FROZEN"
        return "frozen 1" in (self._directory / "cgroup.events").read_text()


_PROGRAMS = ("unshare", "nsenter", "mount", "ip")
_PROBE = "ip link add polytrain0 type bridge && ip link add polytrain1 type veth peer polytrain2"


class HostsUnavailable(Exception):
    """This machine can't be made into several hosts, or lacks what a fault of theirs needs."""


@cache
def why_no_hosts() -> str | None:
    """What this machine lacks to be several hosts; None if it can be. Tests skip with it."""
    if sys.platform != "linux":
        return "hosts are Linux namespaces, and this isn't Linux"
    if os.geteuid() != 0:
        return "hosts are Linux namespaces, which only root may make"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages iproute2, util-linux)"
    if not freezer_roots():
        return "no control group can be frozen: neither cgroup v2 nor the freezer of v1 is mounted"
    tried = subprocess.run(
        ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "sh", "-c", _PROBE],
        capture_output=True,
        text=True,
    )
    return f"namespaces can't be made: {tried.stderr.strip()}" if tried.returncode else None


MEMORY = Path("/tmp")
DISK = Path("/var/tmp")
"""Where a host's own disk is. Like most, it isn't the file system of /tmp or of the storage."""

DISK_MB = 512
_HIDDEN = (MEMORY, DISK, Path("/dev/shm"))


def mount_script(
    *, shared: Path | None, needed: Iterable[Path], addresses: Mapping[str, str]
) -> str:
    """Shell commands that make a host's file systems, in namespaces of its own.

    Args:
        shared: a directory of the machine that all hosts see, at the same path.
        needed: what programs are read from; it can be read also where a host has its own files.
        addresses: of all hosts, by their names.
    """
    hidden = [path for path in needed if _is_hidden(path)]
    # The shared directory last: it may be inside of one of the others.
    outside = [*hidden, *([shared] if shared is not None else [])]
    lines = ["set -e", "mount --make-rprivate /", *_kept(outside)]
    lines += [f"mount -t tmpfs -o size=8g,mode=1777 host {path}" for path in (MEMORY, "/dev/shm")]
    lines += [f"mount -t tmpfs -o size={DISK_MB}m,mode=1777 host {DISK}", f"mkdir {DISK}/home"]
    for number, path in enumerate(outside):
        lines += _given(number, path)
        if number < len(hidden):
            lines.append(f"mount -o remount,bind,ro {shlex.quote(str(path))}")
    lines += ["umount -l /mnt", "mount -t proc proc /proc"]
    lines += _file("/etc/hosts", ["127.0.0.1 localhost", *map(_line, addresses.items())])
    # No name server: a name that isn't in the table is unknown at once.
    lines += _file("/etc/resolv.conf", [])
    # What blocks packets looks at IPv4.
    lines.append("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6 || true")
    # The machine's own directories: nothing that runs in a host changes them.
    lines += ["mount -o remount,bind,ro /"]
    return "\n".join(lines)


def _is_hidden(path: Path) -> bool:
    # Not these themselves, though a script may lie there: they are a host's own.
    return any(directory in path.parents for directory in _HIDDEN)


def _kept(outside: list[Path]) -> list[str]:
    """Take hold of directories under /mnt, before the host's own ones are mounted over them."""
    lines = ["mount -t tmpfs host /mnt"]
    for number, path in enumerate(outside):
        lines += [f"mkdir /mnt/{number}", f"mount --bind {shlex.quote(str(path))} /mnt/{number}"]
    return lines


def _given(number: int, path: Path) -> list[str]:
    place = shlex.quote(str(path))
    return [f"mkdir -p {place}", f"mount --move /mnt/{number} {place}"]


def _file(path: str, lines: list[str]) -> list[str]:
    own = f"{MEMORY}/.{Path(path).name}"
    text = shlex.quote("".join(f"{line}\n" for line in lines))
    return [f"printf %s {text} > {own}", f"mount --bind {own} {path}"]


def _line(entry: tuple[str, str]) -> str:
    name, address = entry
    return f"{address} {name}"
