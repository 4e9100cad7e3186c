"""The streaming data sets of a run on Ray: one actor for each, anew for every attempt."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayError, RayTaskError

from polytrain.data.plan.stream_partitioner import Segment
from polytrain.data.shards.assignment import RunDataset
from polytrain.data.streams.ray_stream import End, read_part, start_stream
from polytrain.workers.stream_connection import serve_stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """Where an agent gets its parts of a streaming data set."""

    actor: Any
    schema: pa.Schema


class Streams:
    """The actors that run the pipelines, owned by the driver.

    An attempt that ends has its actors killed: nothing else ends a pipeline that shuffles.
    """

    def __init__(self, datasets: Sequence[RunDataset], held: Mapping[str, float]) -> None:
        """
        Args:
            datasets: of the run; those that stream are started.
            held: resources of all workers together.
        """
        self._datasets = [dataset for dataset in datasets if dataset.source.stream is not None]
        self._held = held
        self._actors: list[Any] = []

    def start(self) -> tuple[StreamOrder, ...]:
        """Have the pipelines ready for a new attempt."""
        self.close()
        orders = []
        for dataset in self._datasets:
            actor = start_stream(dataset.name, dataset.source.stream, self._held)
            self._actors.append(actor)
            notices = actor.notices.options(num_returns="streaming").remote()
            threading.Thread(
                target=_tell, args=(notices,), name="polytrain-notices", daemon=True
            ).start()
            orders.append(StreamOrder(actor=actor, schema=dataset.source.schema))
        return tuple(orders)

    def close(self) -> None:
        """End all pipelines."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()


def _tell(notices: Any) -> None:
    """Log what a generator yields that the user should know, until its actor has been ended."""
    with contextlib.suppress(RayError):
        for notice in notices:
            logger.warning("%s", ray.get(notice))


def open_lines(
    orders: Sequence[StreamOrder], *, attempt: int, world_size: int, rank: int
) -> list[socket.socket]:
    """Lines for a new worker, each served by a thread of this agent while the worker lives."""
    lines = []
    for order in orders:
        ours, theirs = socket.socketpair()
        threading.Thread(
            target=_serve,
            args=(ours, order, attempt, world_size, rank),
            name="polytrain-stream",
            daemon=True,
        ).start()
        lines.append(theirs)
    return lines


def _serve(
    connection: socket.socket, order: StreamOrder, attempt: int, world_size: int, rank: int
) -> None:
    actor = order.actor

    def begin(epoch: int, legs: tuple[Segment, ...]) -> None:
        _answer(actor.begin.remote(attempt, epoch, legs, world_size))

    def next_part(epoch: int, index: int) -> pa.Table | int:
        part = _answer(actor.next_part.remote(attempt, epoch, rank, index))
        return part.rows if isinstance(part, End) else read_part(part, order.schema)

    serve_stream(connection, begin=begin, next_part=next_part)


def _answer(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        # The pipeline's own words, without the way that they came.
        raise error.cause from None
