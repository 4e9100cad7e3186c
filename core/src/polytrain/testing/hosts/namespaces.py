"""What hosts are made of: namespaces, control groups, mounts, and a switch between them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from polytrain.testing.hosts import keeper
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


_GATEWAY = "10.77.0.254"
_FIRST_PACKET = "match ip protocol 6 0xff match u8 0x02 0x12 at 33"
"""TCP with SYN and without ACK, in a filter of `tc`."""


def address_of(number: int) -> str:
    """The address of a host; the first has the number 1."""
    return f"10.77.0.{number}"


class Switch:
    """Connects hosts, and does to their packets what a broken network does."""

    def __init__(self, keeper_pid: int) -> None:
        self._pid = keeper_pid
        # Of each port the process whose network is at its other end.
        self._ports: dict[int, int] = {}
        self._slowed: set[int] = set()
        self._filtered: set[int] = set()
        self._ip(
            "link set lo up",
            # Without a delay: a port forwards as soon as it is on the bridge.
            "link add switch type bridge forward_delay 0",
            f"addr add {_GATEWAY}/24 dev switch",
            "link set switch up",
            # Where packets go that a filter takes out. Not every kernel has an action that drops.
            "link add sink type veth peer name drain",
            "link set sink up",
            "link set drain up",
        )
        # What is sent to the world beyond is refused at once, instead of being waited for.
        self._do("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def connect(self, number: int, pid: int) -> None:
        """Give the namespace of process `pid` a link to this switch."""
        self._ports[number] = pid
        self._ip(
            f"link add port{number} type veth peer name eth0 netns {pid}",
            f"link set port{number} master switch up",
        )
        _run_in(
            pid,
            "ip",
            "link set lo up",
            f"addr add {address_of(number)}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {_GATEWAY}",
        )

    def cut(self, number: int) -> None:
        """Let packets to and from a host vanish. Its link stays up."""
        self._ip(f"link set port{number} nomaster")

    def block(self, number: int, *, incoming: bool, ports: range) -> None:
        """Drop the first packet of connections to a host, or from it, to any of `ports`."""
        way = "dst" if incoming else "src"
        sources = [port for port in self._ports if (port == number) != incoming]
        for port in sources:
            if port not in self._filtered:
                self._run("tc", f"qdisc add dev port{port} handle ffff: ingress")
                self._filtered.add(port)
            self._run(
                "tc",
                *(
                    f"filter add dev port{port} parent ffff: protocol ip u32"
                    f" match ip {way} {address_of(number)}/32 {_FIRST_PACKET}"
                    f" match u16 {first:#06x} {mask:#06x} at 22"
                    " action mirred egress redirect dev sink"
                    for first, mask in blocks_of(ports)
                ),
            )

    def slow(self, number: int, *, mbit: float | None, ms: float) -> None:
        """Limit and delay packets to and from a host."""
        self._unslow(number)
        if ms:
            rate = f" rate {mbit}mbit" if mbit else ""
            line = f"netem delay {ms}ms limit 100000{rate}"
        else:
            line = f"tbf rate {mbit}mbit burst 64kb latency 1s"
        self._run("tc", f"qdisc add dev port{number} root {line}")
        self._slowed.add(number)
        _run_in(self._ports[number], "tc", f"qdisc add dev eth0 root {line}")

    def _unslow(self, number: int) -> None:
        if number in self._slowed:
            self._slowed.remove(number)
            self._run("tc", f"qdisc del dev port{number} root")
            _run_in(self._ports[number], "tc", "qdisc del dev eth0 root")

    def restore(self, number: int) -> None:
        """Connect a host again, and take all filters away, those for other hosts too."""
        self._ip(f"link set port{number} master switch")
        self._unslow(number)
        self._run("tc", *(f"qdisc del dev port{port} ingress" for port in self._filtered))
        self._filtered.clear()

    def _ip(self, *lines: str) -> None:
        self._run("ip", *lines)

    def _run(self, program: str, *lines: str) -> None:
        _run_in(self._pid, program, *lines)

    def _do(self, *command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._pid), "-n", *command], check=True)


def _run_in(pid: int, program: str, *lines: str) -> None:
    """Run lines of `ip` or `tc` in the network of a process."""
    done = subprocess.run(
        ["nsenter", "-t", str(pid), "-n", program, "-batch", "-"],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise HostsUnavailable(f"{program} refused one of {lines}: {done.stderr.strip()}")


def blocks_of(ports: range) -> Iterator[tuple[int, int]]:
    """Ports as numbers with masks, which is all that a filter compares with."""
    at, end = ports.start, ports.stop
    while at < end:
        size = at & -at or 1 << 16
        while at + size > end:
            size >>= 1
        yield at, 0x10000 - size
        at += size


@contextmanager
def switch(owner: int, groups: Path) -> Iterator[Switch]:
    """A switch, and the process that keeps it. With this block all hosts end.

    Args:
        owner: a pidfd of this process.
        groups: the directory of the hosts' control groups, which is made and removed.
    """
    script = [sys.executable, "-I", "-S", keeper.__file__, str(owner), str(groups)]
    with subprocess.Popen(
        ["unshare", "--net", "--", *script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[owner],
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise HostsUnavailable("the process that keeps the switch has ended: see its error")
        yield Switch(process.pid)
