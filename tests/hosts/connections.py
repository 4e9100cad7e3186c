"""A server in one host, and a connection to it from another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from polytrain.testing.hosts import Host

PORT = 30_000

_SERVE = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    sys.stdout.write("accepted\\n"); sys.stdout.flush()
    while data := connection.recv(1 << 16):
        if data.endswith(b"!"):
            connection.sendall(b"!")
"""
_CONNECT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])):
    pass
"""
_TALK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
print("connected", flush=True)
for line in sys.stdin:
    seconds, size = line.split()
    connection.settimeout(float(seconds))
    try:
        connection.sendall(b"." * int(size) + b"!")
        print("answer" if connection.recv(1) else "end", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


def words(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


@contextmanager
def serving(host: Host, port: int = PORT) -> Iterator[None]:
    """A server on a host that sends back what it gets, of one connection after another."""
    server = host.start([sys.executable, "-c", _SERVE, str(port)], output=subprocess.PIPE)
    assert words(server).readline() == "listening\n", server
    try:
        yield
    finally:
        server.kill()
        server.communicate()


def reaches(host: Host, other: Host, *, port: int = PORT, seconds: float = 1) -> str:
    """What comes of an attempt to connect: "yes" or the name of the error."""
    command = [sys.executable, "-c", _CONNECT, other.address, str(port), str(seconds)]
    done = host.run(command, check=False)
    return "yes" if done.returncode == 0 else done.stderr.splitlines()[-1].partition(":")[0]


class Talk:
    """An open connection from one host to the server of another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def say(self, seconds: float = 10, data: int = 0) -> str:
        """Send some bytes; return what comes of it: "answer", "end" or the name of the error."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds} {data}\n")
        self._process.stdin.flush()
        return words(self._process).readline().strip()


@contextmanager
def talking(host: Host, other: Host, port: int = PORT) -> Iterator[Talk]:
    process = host.start(
        [sys.executable, "-c", _TALK, other.address, str(port)],
        input=subprocess.PIPE,
        output=subprocess.PIPE,
    )
    assert words(process).readline() == "connected\n"
    try:
        yield Talk(process)
    finally:
        process.kill()
        process.communicate()
