"""Several hosts on one machine."""

from __future__ import annotations

import itertools
import os
import shlex
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from polytrain.testing.hosts import keeper
from polytrain.testing.hosts.available import HostsUnavailable, why_no_hosts
from polytrain.testing.hosts.freezer import Freezer, freezer_roots
from polytrain.testing.hosts.host import Host
from polytrain.testing.hosts.mounts import mount_script
from polytrain.testing.hosts.switch import Switch, address_of, switch

_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
_counter = itertools.count()


@contextmanager
def hosts(count: int, *, shared: Path | None = None) -> Iterator[tuple[Host, ...]]:
    """Several hosts on this machine, connected by a switch, for as long as the block lasts.

        with hosts(3, shared=tmp_path) as (a, b, c):
            a.run([sys.executable, script])
            b.crash()

    A host has a network, a name, processes, a /tmp, a /dev/shm and a disk of its own; of the
    machine's other files it sees all and changes none. It reaches the other hosts and nothing else.
    All processes of all hosts end with the block, or with this process, however it ends.

    Args:
        count: how many, up to 26. Their names are a, b, c and so on.
        shared: a directory of this machine that all hosts see and write, at the same path.

    Raises:
        HostsUnavailable: this machine can't do that. `why_no_hosts` says it before.
    """
    reason = why_no_hosts()
    if reason is not None:
        raise HostsUnavailable(reason)
    groups = freezer_roots()[0] / f"polytrain-hosts-{os.getpid()}-{next(_counter)}"
    names = string.ascii_lowercase[:count]
    with ExitStack() as stack:
        owner = os.pidfd_open(os.getpid())
        stack.callback(os.close, owner)
        network = stack.enter_context(switch(owner, groups))
        script = mount_script(
            shared=shared,
            needed=_needed(),
            addresses={name: address_of(at) for at, name in enumerate(names, 1)},
        )
        yield tuple(
            stack.enter_context(
                _booted(
                    number=number,
                    name=name,
                    shared=shared,
                    switch=network,
                    freezer=Freezer(groups / name),
                    script=f"hostname {name}\n{script}",
                    owner=owner,
                )
            )
            for number, name in enumerate(names, 1)
        )


@contextmanager
def _booted(
    *,
    number: int,
    name: str,
    shared: Path | None,
    switch: Switch,
    freezer: Freezer,
    script: str,
    owner: int,
) -> Iterator[Host]:
    first = shlex.join([sys.executable, "-I", "-S", keeper.__file__, str(owner)])
    enter = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--", "sh", "-c"]
    line = shlex.join([*enter, f"{script}\nexec {first}"])
    waiter = subprocess.Popen(
        ["sh", "-c", f"echo 0 > {shlex.quote(str(freezer.members))} && exec {line}"],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[owner],
        start_new_session=True,
    )
    with waiter:
        assert waiter.stdout is not None
        assert waiter.stderr is not None
        if not waiter.stdout.readline():
            raise HostsUnavailable(f"host {name} didn't start: {waiter.stderr.read().strip()}")
        pid = psutil.Process(waiter.pid).children()[0].pid
        host = Host(
            number=number,
            name=name,
            shared=shared,
            switch=switch,
            freezer=freezer,
            pid=pid,
            waiter=waiter,
        )
        try:
            switch.connect(number, pid)
            yield host
        finally:
            host.kill()


def _needed() -> list[Path]:
    """What this process reads Python's modules from."""
    found = {Path(place).resolve() for place in (sys.prefix, sys.base_prefix, *sys.path) if place}
    return sorted(path for path in found if path.is_dir())
