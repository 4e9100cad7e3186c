"""A host's file systems: what it sees of the machine, and what is its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

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
