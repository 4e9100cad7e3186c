"""The way to a zygote, while the one that was there before is about to be gone."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys

from polytrain.common.processes import peer_of
from polytrain.workers.processes.client import ZygoteConnection, ZygoteSpec, preloaded_name

SLOW_TO_END = """
import os, resource, socket, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
listener = socket.socket(socket.AF_UNIX)
listener.bind(chr(0) + sys.argv[1])
listener.listen()
print("listening", flush=True)
between = [os.open("/proc/self/stat", 0) for _ in range(4000)]
connection, _ = listener.accept()
print("connected", flush=True)
sys.stdin.read()
"""


def test_nobody_is_connected_to_a_zygote_that_is_about_to_be_gone() -> None:
    """It closes its connections before its name: thousands of files lie between the two here."""
    name = secrets.token_hex(8)
    spec = ZygoteSpec(name=f"\0{name}", environment={}, modules=(), path=tuple(sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_END, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == "listening\n"
        before = ZygoteConnection.open(spec)
        assert dying.stdout.readline() == "connected\n"
        dying.send_signal(signal.SIGKILL)
        assert before.socket.recv(1) == b""
        before.leave()
        after = ZygoteConnection.open(spec)
        try:
            assert peer_of(after.socket)[0] != dying.pid
        finally:
            after.close()


def test_what_another_zygote_has_learned_is_left_alone() -> None:
    """One that was killed leaves it behind for a moment, under the name that the next one has."""
    name = f"\0{secrets.token_hex(8)}"
    spec = ZygoteSpec(name=name, environment={}, modules=(), path=tuple(sys.path))
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(preloaded_name(name))
        left_behind.listen()
        zygote = ZygoteConnection.open(spec)
        try:
            assert ZygoteConnection.to_preloaded(spec) is None
        finally:
            zygote.close()
