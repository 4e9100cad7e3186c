"""The members of one attempt of a run, and what each offers to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polytrain_plugins.type_names import a_type

_PLAIN = (str, int, float, bytes, bytearray, memoryview, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank of an attempt: where it stands among all ranks and on its node."""

    rank: int
    """0 … world_size - 1."""

    world_size: int

    local_rank: int
    """Position among the ranks of the same node, 0 … local_world_size - 1."""

    local_world_size: int

    node_rank: int
    """Position of the node among the run's nodes, 0 … node_count - 1."""

    node_count: int

    host: str
    """Address of the node, reachable from the other members: on the network that
    `RunConfig.network_interface` names, if it is given."""

    cpus: int
    """CPU threads that this rank may use, at least 1."""

    gpus: int
    """GPUs of this rank; it may share one with others. Its process sees only these, numbered from
    0, unless the engine makes more of them visible."""

    ports: range | None = None
    """Ports at which this rank may listen, as `RunConfig.ports` says; None for any. All ranks of a
    node share them. `held_port` and `listening_socket` choose one."""

    interface: str | None = None
    """The network interface with `host`, if `RunConfig.network_interface` is given; otherwise the
    framework chooses."""

    @property
    def listen_host(self) -> str:
        """The address at which to listen, and to offer: the loopback address if all members are on
        one node, where nobody else has to connect; otherwise the node's."""
        return "127.0.0.1" if self.node_count == 1 else self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank sends to the others before they join: its address, or a service's details."""

    host: str | None = None
    port: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """Anything else, in plain values (str, int, float, bool, None, bytes, lists and dicts)."""

    def __post_init__(self) -> None:
        for name in ("host", "port", "details"):
            _expect_plain(f"Offer.{name}", getattr(self, name))

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self.host}:{self.port}"


def _expect_plain(name: str, value: Any) -> None:
    """Raise TypeError for a value that can't be sent to the other ranks."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _expect_plain(f"{name}[{key!r}]", inner)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            _expect_plain(f"{name}[{place}]", inner)
    elif not isinstance(value, _PLAIN):
        raise TypeError(
            f"{name} is {a_type(value)}. Offer plain values: str, int, float, bool, None, bytes, "
            "lists and dicts."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The members and their offers, in rank order. The same on every rank, except for `me`."""

    attempt: int
    """Number of the attempt, from 0. Messages from processes of an earlier attempt are ignored."""

    me: Member
    members: tuple[Member, ...]
    offers: tuple[Offer, ...]

    virtual_workers: int | None = None
    """`ScalingConfig.virtual_workers`: the number of parts of each global batch that are computed
    apart and added in a fixed order, whatever the number of ranks. `virtual_workers_of` says which
    are a rank's."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def leader(self) -> Offer:
        """The offer of rank 0."""
        return self.offers[0]
