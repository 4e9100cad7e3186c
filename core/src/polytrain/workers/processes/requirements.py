"""Checks the worker processes' requirements of the system, before any starts."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator

from polytrain_plugins import Problem


def system_problems() -> Iterator[Problem]:
    """Yield required system calls that the kernel or a container's sandbox refuses."""
    for name, attempt in _NEEDED.items():
        try:
            attempt()
        except (OSError, AttributeError) as error:
            yield Problem(
                field="ScalingConfig.num_workers",
                what=f"worker processes need {name}, which this system refuses ({error})",
                remedy="Use Linux 5.3 or newer, allow it in the container's seccomp profile, or "
                "train in this process with num_workers=0",
            )


def _watch_process() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _share_memory() -> None:
    os.close(os.memfd_create("polytrain-probe"))


def _listen() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0polytrain-probe-{secrets.token_hex(8)}")


_NEEDED: dict[str, Callable[[], None]] = {
    "pidfd_open": _watch_process,
    "memfd_create": _share_memory,
    "abstract Unix sockets": _listen,
}
