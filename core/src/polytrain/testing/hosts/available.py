"""Whether this machine can be made into several, and if not, why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache

from polytrain.testing.hosts.freezer import freezer_roots

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
