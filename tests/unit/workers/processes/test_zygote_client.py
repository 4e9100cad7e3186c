"""The way to a zygote, while the one that was there before is about to be gone."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from polytrain.linux.processes import peer_of
from polytrain.workers.processes import zygote, zygote_connection
from polytrain.workers.processes.channel import SocketChannel, pack
from polytrain.workers.processes.zygote_client import ZygoteClient
from polytrain.workers.processes.zygote_connection import (
    ZygoteConnection,
    ZygoteSpec,
    attempts_to_connect,
    zygote_name,
)

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


def spec_named(name: str) -> ZygoteSpec:
    return ZygoteSpec(name=name, environment={}, modules=(), path=tuple(sys.path))


def seem_to_be_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all other processes those of another user."""
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)


def test_nothing_is_sent_to_another_users_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may have an abstract address, and /proc/net/unix shows everybody's."""
    spec = spec_named(f"\0{secrets.token_hex(8)}")
    heard = []
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind(spec.name)
        impostor.listen()

        def listen() -> None:
            connection, _ = impostor.accept()
            with connection:
                heard.append(connection.recv(1 << 16))

        listening = threading.Thread(target=listen)
        listening.start()
        me = os.getuid()
        seem_to_be_another_user(monkeypatch)
        with pytest.raises(PermissionError, match=rf"user {me}\b.*this is user {me + 1}\b"):
            ZygoteConnection.open(spec)
        listening.join(timeout=30)
    assert heard == [b""]


def test_users_have_zygotes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver and a raylet of two users: neither is connected to the other's."""
    own = zygote_name("token", "node")
    assert own == zygote_name("token", "node")
    seem_to_be_another_user(monkeypatch)
    assert zygote_name("token", "node") != own


def test_an_address_tells_neither_the_run_nor_the_node() -> None:
    """Who knows the addresses on one node doesn't know those on others."""
    address = zygote_name("the-token", "the-node")
    assert "the-token" not in address
    assert "the-node" not in address
    longest = zygote_name("a" * 16, "b" * 56) + "c" * 8
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(longest)


def test_what_a_zygote_is_told_is_not_in_its_command_line() -> None:
    """Everybody can read it."""
    spec = spec_named(f"\0{secrets.token_hex(8)}")
    connection = ZygoteConnection.open(spec)
    try:
        connection.request(["is current"])
        assert SocketChannel(connection.socket).receive() == ["is current", True]
        command = Path(f"/proc/{connection.pid}/cmdline").read_text()
    finally:
        connection.close()
    assert "polytrain.workers.processes.zygote" in command
    assert spec.name[1:] not in command


def test_an_address_that_nobody_answers_at_is_not_tried_for_ever() -> None:
    """A process that has it, and doesn't listen."""
    spec = spec_named(f"\0{secrets.token_hex(8)}")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(spec.name)
        with pytest.raises(ConnectionError, match=r"doesn.t answer within 0\.05 s"):
            ZygoteConnection.open(spec, within_s=0.05)


def test_a_zygote_turns_another_users_process_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as ours:
        listener.bind(f"\0{secrets.token_hex(8)}")
        listener.listen()
        ours.connect(listener.getsockname())
        seem_to_be_another_user(monkeypatch)
        # This process has children that aren't a zygote's.
        monkeypatch.setattr(zygote, "kill_children", lambda is_doomed: None)
        # It ends at once: nobody is its client.
        zygote.Zygote(listener).serve()
        assert ours.recv(1) == b""


def test_a_zygote_starts_beside_files_that_are_called_like_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has the driver's `sys.path`, the working directory is the first place in its own."""
    for name in ("json", "socket", "subprocess", "pickle", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not that one')")
    monkeypatch.chdir(tmp_path)
    connection = ZygoteConnection.open(spec_named(f"\0{secrets.token_hex(8)}"))
    try:
        connection.request(["is current"])
        assert SocketChannel(connection.socket).receive() == ["is current", True]
    finally:
        connection.close()


def test_a_forked_child_has_no_connection_to_the_zygote() -> None:
    connection = ZygoteConnection.open(spec_named(f"\0{secrets.token_hex(8)}"))
    try:
        descriptor = connection.socket.fileno()
        child = os.fork()
        if child == 0:
            os._exit(os.path.exists(f"/proc/self/fd/{descriptor}"))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        # The child has closed it for itself alone.
        connection.request(["is current"])
        assert SocketChannel(connection.socket).receive() == ["is current", True]
    finally:
        connection.close()


@contextmanager
def taken(name: str) -> Iterator[None]:
    """Have an address at which nobody is let in: as many wait there as may."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(name)
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(name)
        yield


def test_an_address_at_which_too_many_wait_is_tried_for_a_limited_time() -> None:
    spec = spec_named(f"\0{secrets.token_hex(8)}")
    with taken(spec.name), pytest.raises(ConnectionError, match=r"doesn.t answer within 0\.05 s"):
        ZygoteConnection.open(spec, within_s=0.05)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(spec.name)


def test_a_connection_is_made_once_there_is_room_for_it() -> None:
    spec = spec_named(f"\0{secrets.token_hex(8)}")
    attempts = attempts_to_connect(spec)
    with taken(spec.name):
        assert next(attempts) is None
    connection = next(attempts)
    assert connection is not None
    connection.close()


def test_an_agent_does_its_other_work_while_it_does_not_reach_its_zygote() -> None:
    async def test() -> None:
        spec = spec_named(f"\0{secrets.token_hex(8)}")
        zygotes = ZygoteClient(spec, "", listener=Mock())
        with taken(spec.name):
            connecting = asyncio.create_task(zygotes.connect())
            # A loop that was blocked would do nothing of this before the address is free.
            await asyncio.wait({connecting}, timeout=0)
            assert not connecting.done()
        await asyncio.wait_for(connecting, timeout=30)
        process = zygotes.close()
        assert process is not None
        process.wait(timeout=30)

    asyncio.run(test())


@contextmanager
def stopped_zygote() -> Iterator[ZygoteConnection]:
    """One that runs no further: a signal has stopped it."""
    connection = ZygoteConnection.open(spec_named(f"\0{secrets.token_hex(8)}"))
    connection.request(["is current"])
    assert SocketChannel(connection.socket).receive() == ["is current", True]
    assert connection.pid is not None
    os.kill(connection.pid, signal.SIGSTOP)
    try:
        yield connection
    finally:
        with suppress(ProcessLookupError):
            os.kill(connection.pid, signal.SIGKILL)


def test_a_zygote_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_connection, "_ENDED_WITHIN_S", 0.05)
    with stopped_zygote() as connection:
        connection.close()
        assert not psutil.pid_exists(connection.pid)


def test_requests_that_are_not_taken_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has room for some. Who made them must not wait for the others for ever."""
    monkeypatch.setattr(zygote_connection, "_TAKEN_WITHIN_S", 0.05)
    with stopped_zygote() as connection:
        with pytest.raises(TimeoutError, match=r"has taken no request for 0\.05 s"):
            deque(connection.request(["kill", number]) for number in itertools.count())
        # It wouldn't find where the next one begins.
        with pytest.raises(BrokenPipeError):
            connection.request(["is current"])
        connection.end()


def test_a_zygote_of_another_version_is_not_current() -> None:
    """Whoever edits polytrain itself may have one of before."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = ZygoteConnection(ours)
        theirs.sendall(pack(["holds", 1]))
        assert not connection.is_current()
        connection.leave()
