"""Authenticated connections between ranks, which share a key.

The key is never sent here. Each end proves that it has the key by an HMAC over random bytes of both
ends, which is valid for this connection only. Then every message carries an HMAC that also covers
its number and its sender. Messages aren't encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from polytrain_plugins import World, listening_socket

_TOGETHER_S = 300.0
"""Seconds for all ranks to connect. They all start when they have each other's offers."""

_SILENT_S, _ASKS_EVERY_S, _ASKS = 10, 5, 4
"""A rank that waits asks a host that has been silent so long whether it is still there (TCP
keepalive), and loses the connection after so many questions without an answer."""

_LENGTH = struct.Struct("<Q")
_NONCE = 16
_TAG = hashlib.sha256().digest_size
_HELLO = struct.Struct(f"<{_NONCE}sI{_TAG}s")
"""A rank's first message: its random bytes, its rank, and the proof that it has the key."""

_WAITING = 256
"""Maximum number of unauthenticated connections; beyond it the oldest is closed."""


class RankConnection:
    """One end of a connection to another rank."""

    def __init__(
        self, connection: socket.socket, key: bytes | None = None, *, is_leader: bool = False
    ) -> None:
        """
        Args:
            connection: a connected socket.
            key: the connection's key; None if both ends are in this process.
            is_leader: whether this is rank 0's end.
        """
        self._connection = connection
        self._key = key
        self._sent, self._received = 0, 0
        self._mine, self._theirs = (b"leader", b"rank") if is_leader else (b"rank", b"leader")

    def fileno(self) -> int:
        """Return the socket's file descriptor, for a selector: readable when a message arrives, or
        when the other rank has left."""
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        """Send a message of any size."""
        tag = self._tag(self._mine, self._sent, message)
        self._sent += 1
        self._connection.sendall(_LENGTH.pack(len(message)) + tag + message)

    def close_for_sending(self) -> None:
        """Tell the other rank that no more messages follow; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def receive(self) -> bytes:
        """Wait for the next message.

        Raises:
            ConnectionError: the other rank has left, or the message isn't from it.
        """
        [length] = _LENGTH.unpack(_exactly(self._connection, _LENGTH.size))
        tag = b"" if self._key is None else _exactly(self._connection, _TAG)
        message = _exactly(self._connection, length)
        if not hmac.compare_digest(tag, self._tag(self._theirs, self._received, message)):
            raise ConnectionError("a message isn't what a worker of this run has sent")
        self._received += 1
        return message

    def _tag(self, sender: bytes, number: int, message: bytes) -> bytes:
        if self._key is None:
            return b""
        found = hmac.new(self._key, sender + _LENGTH.pack(number), "sha256")
        found.update(message)
        return found.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderListener:
    """Rank 0's listening socket, and the ranks' shared key."""

    listening_socket: socket.socket
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """The shared key; other ranks get it from rank 0's offer."""

    @property
    def details(self) -> Mapping[str, Any]:
        """The port and the key, for rank 0's offer."""
        return {
            "collective_port": self.listening_socket.getsockname()[1],
            "collective_key": self.key,
        }


@contextmanager
def leader_listener(host: str, ports: range | None = None) -> Iterator[LeaderListener]:
    """Listen on a free port of this address only, which is the one the other ranks connect to.

    Args:
        host: the address.
        ports: those to choose from; None for any.
    """
    with listening_socket(host, ports) as listener:
        yield LeaderListener(listening_socket=listener)


@contextmanager
def connected_ranks(
    world: World, listener: LeaderListener | None, *, within_s: float = _TOGETHER_S
) -> Iterator[Sequence[RankConnection]]:
    """Connect every rank to rank 0, whose offer has its address and `LeaderListener.details`.

    Yields on rank 0 the connections to the others, by rank; elsewhere, that to rank 0.

    Args:
        world: all ranks.
        listener: rank 0's listener; None on the others.
        within_s: seconds for all ranks to connect.

    Raises:
        TimeoutError: some ranks haven't connected in time; the message names them.
        ConnectionError: the listener doesn't have the key.
        OSError: nothing listens there, or it doesn't answer in time.
        ValueError: rank 0's offer isn't that of its listener.
    """
    with ExitStack() as stack:
        if listener is not None:
            key, count = bytes.fromhex(listener.key), world.size - 1
            yield _accept_ranks(listener.listening_socket, key, count, stack, within_s=within_s)
            return
        leader = world.leader
        if leader.host is None or "collective_port" not in leader.details:
            raise ValueError(
                "rank 0's offer doesn't say where to connect. Its engine's `offering` must yield "
                "the offer of the collective's `offering`, or one with `LeaderListener.details`"
            )
        address = (leader.host, leader.details["collective_port"])
        key = bytes.fromhex(leader.details["collective_key"])
        yield [_connect_to_leader(address, key, world.me.rank, stack, within_s=within_s)]


def _connect_to_leader(
    address: tuple[str, int], key: bytes, rank: int, stack: ExitStack, *, within_s: float
) -> RankConnection:
    """Connect to rank 0.

    Args:
        address: host and port of rank 0.
        key: the attempt's key.
        rank: this rank.
        stack: closes the connection in the end.
        within_s: timeout in seconds.

    Raises:
        ConnectionError: the listener doesn't have the key.
        OSError: nothing listens there, or it doesn't answer in time.
    """
    connection = stack.enter_context(socket.create_connection(address, timeout=within_s))
    theirs, mine = _exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
    connection.sendall(_HELLO.pack(mine, rank, _proof(key, b"rank", theirs, mine, rank)))
    if not hmac.compare_digest(
        _exactly(connection, _TAG), _proof(key, b"leader", theirs, mine, rank)
    ):
        raise ConnectionError(f"what listens at {address[0]}:{address[1]} isn't rank 0 of this run")
    return _authenticated(
        connection, _proof(key, b"connection", theirs, mine, rank), is_leader=False
    )


def _accept_ranks(
    listener: socket.socket, key: bytes, count: int, stack: ExitStack, *, within_s: float
) -> list[RankConnection]:
    """Wait for the other ranks to connect. Other clients don't block them.

    Args:
        listener: rank 0's listening socket.
        key: the attempt's key.
        count: the number of other ranks; they are 1 to `count`.
        stack: closes the connections in the end.
        within_s: timeout in seconds for all of them.

    Returns:
        The connections, by rank.

    Raises:
        TimeoutError: some ranks haven't connected in time; the message names them.
    """
    deadline = time.monotonic() + within_s
    with _Admission(listener, key, count) as admission:
        while missing := admission.missing:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"{', '.join(f'rank {rank}' for rank in missing)} "
                    f"haven't connected to rank 0 within {within_s:g} s"
                )
            admission.wait(left_s)
        found = admission.take()
    for connection, _ in found:
        stack.enter_context(connection)
    return [
        _authenticated(connection, connection_key, is_leader=True)
        for connection, connection_key in found
    ]


class _Admission:
    """Rank 0's side: reads all connections concurrently, and keeps those that have the key."""

    def __init__(self, listener: socket.socket, key: bytes, count: int) -> None:
        self._listener = listener
        self._key = key
        self._count = count
        self._found: dict[int, tuple[socket.socket, bytes]] = {}
        """Rank → its connection, and the connection's key."""

        self._waiting: dict[socket.socket, tuple[bytes, bytearray]] = {}
        """Connection → the random bytes sent to it, and the part of its answer received so far."""

        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Admission:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for connection in (*self._waiting, *(found for found, _ in self._found.values())):
            connection.close()

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self._count + 1) if rank not in self._found]

    def take(self) -> list[tuple[socket.socket, bytes]]:
        """Return the connections and their keys, by rank. The caller closes the connections."""
        taken = [self._found[rank] for rank in sorted(self._found)]
        self._found.clear()
        return taken

    def wait(self, timeout_s: float) -> None:
        """Wait up to this time for new connections or messages, and handle them."""
        for ready, _ in self._selector.select(timeout_s):
            if ready.fileobj is self._listener:
                # The client may have disconnected again.
                with contextlib.suppress(OSError):
                    self._accept()
            elif isinstance(ready.fileobj, socket.socket) and ready.fileobj in self._waiting:
                with contextlib.suppress(OSError):
                    self._read_hello(ready.fileobj)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        nonce = secrets.token_bytes(_NONCE)
        self._waiting[connection] = nonce, bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._waiting) > _WAITING:
            self._forget(next(iter(self._waiting))).close()
        connection.setblocking(False)
        connection.sendall(nonce)

    def _read_hello(self, connection: socket.socket) -> None:
        nonce, received = self._waiting[connection]
        data = b""
        with contextlib.suppress(OSError):
            data = connection.recv(_HELLO.size - len(received))
        received += data
        if data and len(received) < _HELLO.size:
            return
        self._forget(connection)
        if len(received) == _HELLO.size:
            theirs, rank, proof = _HELLO.unpack(received)
            has_key = hmac.compare_digest(proof, _proof(self._key, b"rank", nonce, theirs, rank))
            if has_key and rank in self.missing:
                connection.setblocking(True)
                connection.sendall(_proof(self._key, b"leader", nonce, theirs, rank))
                connection_key = _proof(self._key, b"connection", nonce, theirs, rank)
                self._found[rank] = connection, connection_key
                return
        connection.close()

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._waiting[connection]
        return connection


def _authenticated(connection: socket.socket, key: bytes, *, is_leader: bool) -> RankConnection:
    connection.settimeout(None)
    # Send small messages at once: Nagle's algorithm would delay them.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that has lost its power closes no connection. TCP_USER_TIMEOUT would also end those of
    # a rank that computes for long before it reads.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASKS_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKS)
    return RankConnection(connection, key, is_leader=is_leader)


def _proof(key: bytes, purpose: bytes, leader: bytes, rank: bytes, number: int) -> bytes:
    """Return the HMAC that proves the key, for one connection and purpose."""
    return hmac.digest(key, b"|".join((purpose, leader, rank, b"%d" % number)), "sha256")


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = peer.recv_into(view[got:])
        if count == 0:
            raise ConnectionError("a rank has left the collective")
        got += count
    return bytes(data)
