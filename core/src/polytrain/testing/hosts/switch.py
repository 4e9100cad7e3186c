"""The network between hosts: a bridge in a namespace of its own, with a port for each host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polytrain.testing.hosts import keeper
from polytrain.testing.hosts.namespaces import HostsUnavailable

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
