"""Checks of the connections between nodes: plain TCP, and two ranks that join by a backend."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polytrain.api.backend_checks import loaded_backends, missing_modules, missing_options
from polytrain.policy.links import ALL_UP_TO, FailedLink, described, remedy_for, targets
from polytrain.policy.placement import NodeAddress, members
from polytrain.view.doctor.finding import CheckFailed, Finding, Verdict, checked, failed_with
from polytrain.workers.ray.links import LinkEnd, failed_links
from polytrain_plugins import Backend, Engine, Member, Offer, World
from polytrain_plugins.returned import engine_of

_CONNECT_TIMEOUT_S = 5.0

_START_TIMEOUT_S = 60.0
"""The framework is imported, on both nodes."""

_JOIN_TIMEOUT_S = 60.0

_CALLS = 20
_FIRST_BYTES = 2**16
_MOST_BYTES = 2**26
_LONG_ENOUGH_S = 0.2
"""Larger pieces are sent until one takes as long."""

_SLOW_S = 0.01
_SLOW_BYTES_PER_S = 20e6

Pair = tuple[NodeAddress, NodeAddress]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What was measured between two ranks."""

    latency_s: float
    """Of the sum of one number: the median."""

    bytes_per_s: float | None
    """From each rank to the other, both at once; None if the backend has no transport of bytes."""


class Endpoint:
    """One rank of a pair, in a process of its own."""

    def __init__(self, backend: Backend) -> None:
        self._engine = engine_of(backend)
        self._offering = contextlib.ExitStack()

    def offer(self, me: Member) -> Offer:
        """Return what the other rank must know."""
        return self._offering.enter_context(self._engine.offering(me))

    def measure(self, world: World) -> Link:
        """Join the other rank, and measure the connection. Both ranks call it."""
        with self._offering, self._engine.joined(world):
            ranks = self._engine.sum_over_ranks([1], world)
            if ranks != [world.size]:
                raise RuntimeError(f"the sum of 1 over {world.size} ranks is {ranks}")
            latency_s = sorted(
                _timed(lambda: self._engine.sum_over_ranks([1], world)) for _ in range(_CALLS)
            )[_CALLS // 2]
            return Link(latency_s=latency_s, bytes_per_s=self._bytes_per_s(world))

    def _bytes_per_s(self, world: World) -> float | None:
        if type(self._engine).gather_over_ranks is Engine.gather_over_ranks:
            # Its bytes would travel as numbers.
            return None
        size = _FIRST_BYTES
        while True:
            gather = partial(self._engine.gather_over_ranks, bytes(size), world, call="doctor")
            took_s = _timed(gather)
            # Both ranks must agree on whether there is another piece.
            [summed_ms] = self._engine.sum_over_ranks([int(1000 * took_s)], world)
            if size >= _MOST_BYTES or summed_ms >= 1000 * world.size * _LONG_ENOUGH_S:
                return size / took_s
            size *= 4


def transports_of(names: Sequence[str]) -> list[Backend]:
    """Return the installed backends of these, torch first, which measures connections best."""
    classes = loaded_backends(sorted(names, key=lambda name: name != "torch"))
    return [
        cls()
        for cls in classes
        if not missing_modules(cls.requires) and not [*missing_options(cls, {})]
    ]


def world_of(pair: Pair, rank: int, offers: Sequence[Offer], *, gpus: int) -> World:
    """Return the world of a pair, as one of its ranks sees it."""
    there = members(pair, cpus=1, gpus=gpus)
    return World(attempt=0, me=there[rank], members=there, offers=tuple(offers))


def rounds(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield all pairs, in rounds in which each node is in one pair at most."""
    left = list(pairs)
    while left:
        chosen: list[Pair] = []
        busy: set[str] = set()
        for pair in left:
            ids = {node.node_id for node in pair}
            if busy.isdisjoint(ids):
                chosen.append(pair)
                busy |= ids
        left = [pair for pair in left if pair not in chosen]
        yield chosen


def ring(nodes: Sequence[NodeAddress]) -> list[Pair]:
    """Return a pair for each node and the next: each node is the first of one, and the second."""
    return list(zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)) if len(nodes) > 1 else []


def verdict(measure: Callable[[], Link]) -> str:
    """Return what was measured, in words.

    Raises:
        CheckFailed: the connection is slow.
    """
    link = measure()
    text = f"joined, {1e6 * link.latency_s:.0f} µs for a sum"
    if link.bytes_per_s is not None:
        text += f", {link.bytes_per_s / 1e6:.0f} MB/s each way"
    is_slow = link.bytes_per_s is not None and link.bytes_per_s < _SLOW_BYTES_PER_S
    if link.latency_s > _SLOW_S or is_slow:
        raise CheckFailed(
            f"{text}: training that sums gradients over these nodes will wait for the network",
            "Use nodes that are closer together, or name the fast interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
            verdict=Verdict.WARNING,
        )
    return text


def findings_of_links(
    backends: Sequence[Backend],
    nodes: Sequence[NodeAddress],
    gpus: Mapping[str, float],
    *,
    join_timeout_s: float = _JOIN_TIMEOUT_S,
) -> Iterator[Finding]:
    """Yield findings on the connections of nodes. Ray is running.

    By plain TCP, nodes connect to each other (see `policy.connections`). By every backend, each
    node has rank 0 in a pair with the next node; by the first, each two of a few nodes join, and
    their GPUs if both have some. Backends aren't tried between nodes that plain TCP doesn't
    connect.

    Args:
        backends: whose transports are tried.
        gpus: the id of a node → how many GPUs it has.
        join_timeout_s: seconds that two ranks may take to join and to measure.
    """
    if len(nodes) > 1:
        failed: list[FailedLink] = []
        yield from _findings_of_tcp(nodes, failed)
        apart = {frozenset((link.source, link.target)) for link in failed}
    else:
        apart = set()

    def connected(pairs: Iterable[Pair]) -> list[Pair]:
        return [pair for pair in pairs if frozenset(node.host for node in pair) not in apart]

    every_two = connected(combinations(nodes, 2) if len(nodes) <= ALL_UP_TO else ring(nodes))
    for number, backend in enumerate(backends):
        in_turn = connected(ring(nodes))
        if number == 0:
            in_turn = [*every_two, *(pair for pair in in_turn if pair not in every_two)]
        for pairs in rounds(in_turn):
            yield from _findings_of(backend, pairs, gpus=0, join_timeout_s=join_timeout_s)
    # Within a node, too, if it has two.
    alone = [[(node, node)] for node in nodes if gpus.get(node.node_id, 0) >= 2]
    having = [pair for pair in every_two if all(gpus.get(node.node_id, 0) >= 1 for node in pair)]
    for pairs in (*rounds(having), *alone) if backends else ():
        yield from _findings_of(backends[0], pairs, gpus=1, join_timeout_s=join_timeout_s)


def _findings_of_tcp(nodes: Sequence[NodeAddress], failed: list[FailedLink]) -> Iterator[Finding]:
    """Yield a finding for each node, on connections of others to it; collect those that failed."""
    hosts = [node.host for node in nodes]
    came_to = Counter(other for others in targets(len(nodes)) for other in others)
    try:
        failed += _failed_links(nodes)
    except Exception as error:  # whatever becomes of the actors is what the user wants to know
        yield failed_with("plain TCP", error)
        return
    for number, host in enumerate(hosts):
        here = [link for link in failed if link.target == host]
        yield checked(f"plain TCP to {host}", partial(_reached, here, came_to[number]))


def _reached(failed: Sequence[FailedLink], tried: int) -> str:
    if failed:
        raise CheckFailed(described(failed), remedy_for(failed))
    return f"{tried} other {'node connects' if tried == 1 else 'nodes connect'} to it"


def _failed_links(nodes: Sequence[NodeAddress]) -> list[FailedLink]:
    ends: list[Any] = [
        ray.remote(LinkEnd)
        .options(num_cpus=0, scheduling_strategy=on_node(node.node_id))
        .remote(node.host)
        for node in nodes
    ]
    hosts = [node.host for node in nodes]
    try:
        trial = failed_links(ends, hosts, timeout_s=_CONNECT_TIMEOUT_S)
        return asyncio.run(asyncio.wait_for(trial, _START_TIMEOUT_S))
    finally:
        for end in ends:
            ray.kill(end)


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return Ray's option that puts a task or an actor on a node."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _findings_of(
    backend: Backend, pairs: Sequence[Pair], *, gpus: int, join_timeout_s: float
) -> Iterator[Finding]:
    def finding_of(pair: Pair) -> Finding:
        first, second = (node.host for node in pair)
        what = f"{backend.name}, GPUs" if gpus else backend.name
        with contextlib.closing(_PairOnRay(backend, pair, gpus=gpus)) as ends:
            link = partial(ends.link, join_timeout_s)
            return checked(f"{first} to {second} ({what})", partial(verdict, link))

    if pairs:
        with ThreadPoolExecutor(len(pairs)) as pool:
            yield from pool.map(finding_of, pairs)


class _PairOnRay:
    """Two actors, on the nodes of a pair."""

    def __init__(self, backend: Backend, pair: Pair, *, gpus: int) -> None:
        self._pair, self._gpus = pair, gpus
        # On different nodes, enough to see one: it is free on a node that is nearly full.
        share = 1.0 if pair[0] == pair[1] else 0.01
        self._ends: list[Any] = [
            ray.remote(Endpoint)
            .options(
                num_cpus=0,
                num_gpus=share if gpus else 0,
                scheduling_strategy=on_node(node.node_id),
            )
            .remote(backend)
            for node in pair
        ]

    def link(self, join_timeout_s: float) -> Link:
        """Join the two, and measure.

        Args:
            join_timeout_s: seconds that this may take once both processes are there.

        Raises:
            CheckFailed: they don't join.
        """
        offers = self._both(
            [
                end.offer.remote(world_of(self._pair, rank, (), gpus=self._gpus).me)
                for rank, end in enumerate(self._ends)
            ],
            _START_TIMEOUT_S,
            "their processes didn't start",
            "Try it again when the nodes are idle",
        )
        links = self._both(
            [
                end.measure.remote(world_of(self._pair, rank, offers, gpus=self._gpus))
                for rank, end in enumerate(self._ends)
            ],
            join_timeout_s,
            "they didn't join",
            "Open all ports between the nodes, and see that each node's name resolves to an "
            "address that the others reach (not 127.0.1.1 in /etc/hosts)",
        )
        slower: Link = max(links, key=lambda link: link.latency_s)
        return slower

    def close(self) -> None:
        """End both processes."""
        for end in self._ends:
            ray.kill(end)

    def _both(self, calls: Sequence[Any], timeout_s: float, what: str, remedy: str) -> list[Any]:
        try:
            answers: list[Any] = ray.get(list(calls), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise CheckFailed(f"{what} within {timeout_s:g} s", remedy) from error
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            summary = str(cause).strip().splitlines()
            raise CheckFailed(
                f"{what}: {type(cause).__name__}: {summary[0] if summary else ''}", remedy
            ) from error
        return answers


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
