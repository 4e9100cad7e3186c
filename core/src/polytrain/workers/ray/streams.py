"""Streams data sets of a run on Ray, with one actor per data set and attempt."""

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
from polytrain.workers.ray.stream_actor import End, read_part, start_stream
from polytrain.workers.session.stream_connection import serve_stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayStreamOrder:
    """The actor from which an agent gets its parts of a streaming data set."""

    actor: Any
    schema: pa.Schema

    def open_line(self, *, world_size: int, rank: int) -> socket.socket:
        """Open a connection for a new worker process, which a thread of the agent serves."""
        ours, theirs = socket.socketpair()
        threading.Thread(
            target=_serve,
            args=(ours, self, world_size, rank),
            name="polytrain-stream",
            daemon=True,
        ).start()
        return theirs


class Streams:
    """Owns the actors that run the pipelines, in the driver.

    The end of an attempt kills its actors: nothing else ends a pipeline that shuffles.
    """

    def __init__(self, datasets: Sequence[RunDataset], held: Mapping[str, float]) -> None:
        """
        Args:
            datasets: the run's data sets; only streaming ones are started.
            held: the resources of all workers together.
        """
        self._datasets = [dataset for dataset in datasets if dataset.source.stream is not None]
        self._held = held
        self._actors: list[Any] = []

    def start(self) -> tuple[RayStreamOrder, ...]:
        """Start the pipelines for a new attempt."""
        self.close()
        orders = []
        for dataset in self._datasets:
            actor = start_stream(dataset.name, dataset.source.stream, self._held)
            self._actors.append(actor)
            notices = actor.notices.options(num_returns="streaming").remote()
            threading.Thread(
                target=_log_notices, args=(notices,), name="polytrain-notices", daemon=True
            ).start()
            orders.append(RayStreamOrder(actor=actor, schema=dataset.source.schema))
        return tuple(orders)

    def close(self) -> None:
        """End all pipelines."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()


def _log_notices(notices: Any) -> None:
    """Log a pipeline's notices for the user, until its actor ends."""
    with contextlib.suppress(RayError):
        for notice in notices:
            logger.warning("%s", ray.get(notice))


def _serve(connection: socket.socket, order: RayStreamOrder, world_size: int, rank: int) -> None:
    actor = order.actor

    def begin(epoch: int, segments: tuple[Segment, ...]) -> None:
        _answer(actor.begin.remote(epoch, segments, world_size))

    def next_part(epoch: int, index: int) -> pa.Table | int:
        part = _answer(actor.next_part.remote(epoch, rank, index))
        return part.rows if isinstance(part, End) else read_part(part, order.schema)

    serve_stream(connection, begin=begin, next_part=next_part)


def _answer(reference: Any) -> Any:
    try:
        # No time limit: a pipeline may take any time. If its actor ends, this raises.
        return ray.get(reference)
    except RayTaskError as error:
        # Raise the pipeline's own error, without Ray's traceback.
        raise error.cause from None
