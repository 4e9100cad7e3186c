"""The actor that runs the pipeline of a `ray.data.Dataset` while the ranks consume its rows.

It divides the blocks among the ranks, and only passes references. A rank's agent fetches its rows
from the object store with `read_part`. This sets the pipeline's speed: unrequested blocks fill the
object store up to Ray Data's own limit, and then the pipeline waits.

Blocks arrive in the pipeline's order. If the pipeline is deterministic, so are the rows of every
rank. If it isn't (a shuffle without a seed, a join, a repartition by keys, or a sort, whose blocks
differ each time), an epoch that is resumed in its middle may repeat rows and skip others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polytrain.data.plan.stream_partitioner import RankRows, Segment, StreamPartitioner
from polytrain.data.read.ray_data import (
    Pipeline,
    plain_rows,
    plain_text,
    prepared,
    reason_of,
)
from polytrain.data.shards.assignment import RunDataset
from polytrain.data.types.columns import empty_table
from polytrain.data.types.schemas import conformed
from polytrain.data_errors import ReadError
from polytrain.ray_api.private import allow_blocking_get, use_in_process
from polytrain.workers.session.stream_connection import serve_stream

logger = logging.getLogger(__name__)


class StreamError(Exception):
    """The pipeline of a data set failed. The message contains the original error's."""


@dataclass(frozen=True, slots=True)
class End:
    """The answer after the last part of an epoch."""

    rows: int
    """Number of rows of all ranks since the last segment."""


class RayStream:
    """The actor of one data set and attempt.

    Every rank requests the indices 0, 1, 2, … of an epoch, each once and at its own pace. A rank
    that requests a part of a later epoch is done with earlier ones. An epoch may begin early, so
    that its pipeline has started when it is needed.
    """

    def __init__(
        self, name: str, dataset: Any, held: Mapping[str, float], notice_after_s: float
    ) -> None:
        """
        Args:
            name: the data set's name, for messages.
            dataset: a copy of the user's `ray.data.Dataset`.
            notice_after_s: seconds that ranks wait for a block before the reason is logged.
        """
        self._name = name
        self._dataset = dataset
        self._held = held
        self._notice_after_s = notice_after_s
        self._epochs: dict[int, _Epoch] = {}
        self._notices: asyncio.Queue[str] = asyncio.Queue()
        allow_blocking_get()
        use_in_process(dataset.context)

    async def begin(self, epoch: int, segments: tuple[Segment, ...], world_size: int) -> None:
        """Start an epoch, unless another rank has.

        Args:
            epoch: number of the epoch, for pipelines that shuffle differently each time.
            segments: the parts of the epoch that are already consumed.
        """
        if epoch not in self._epochs:
            self._epochs[epoch] = _Epoch(
                name=self._name,
                pipeline=Pipeline(prepared(self._dataset, epoch, self._held)),
                partitioner=StreamPartitioner(world_size, segments),
                world_size=world_size,
                notify=self._notices.put_nowait,
                notice_after_s=self._notice_after_s,
            )

    async def next_part(self, epoch: int, rank: int, index: int) -> RankRows[Any] | End:
        """Return the rows of one rank in one round. Wait until the pipeline has yielded them.

        Raises:
            StreamError: the pipeline failed.
        """
        for number, former in list(self._epochs.items()):
            if number < epoch and former.leave(rank):
                del self._epochs[number]
        return await self._epochs[epoch].part(rank, index)

    async def notices(self) -> AsyncIterator[str]:
        """Yield messages for the user when the pipeline waits for resources."""
        while True:
            yield await self._notices.get()


def start_stream(
    name: str, dataset: Any, held: Mapping[str, float], *, notice_after_s: float = 20.0
) -> Any:
    """Start the actor on this node. It owns the blocks; its end frees them.

    Args:
        name: the data set's name.
        dataset: a `ray.data.Dataset`.
        notice_after_s: seconds that ranks wait for a block before the reason is logged.
    """
    here = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(RayStream)
        .options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=here, soft=True)
        )
        .remote(name, dataset, dict(held), notice_after_s)
    )


def read_part(part: RankRows[Any], schema: pa.Schema) -> pa.Table:
    """Fetch the rows of a part. Blocks on this node aren't copied.

    Args:
        part: a part from `RayStream.next_part`.

    Raises:
        ReadError: a column is missing, or has values that don't fit its type.
    """
    blocks = ray.get([rows.block for rows in part])
    try:
        tables = [
            conformed(
                plain_rows(block, rows.start, rows.stop, schema.names),
                schema,
                "a block",
                why_missing="the pipeline's first rows have it",
            )
            for block, rows in zip(blocks, part, strict=True)
        ]
    except ReadError as error:
        raise ReadError(
            f"{error}. The types are those of the pipeline's first rows; dataset.materialize() "
            "has them found from all rows."
        ) from error
    return pa.concat_tables(tables) if tables else empty_table(schema)


class _Epoch:
    """One epoch: the rounds that some rank hasn't taken, and the remaining blocks."""

    def __init__(
        self,
        *,
        name: str,
        pipeline: Pipeline,
        partitioner: StreamPartitioner[Any],
        world_size: int,
        notify: Callable[[str], None],
        notice_after_s: float,
    ) -> None:
        self._name = name
        self._pipeline = pipeline
        self._partitioner = partitioner
        self._notify = notify
        self._notice_after_s = notice_after_s
        self._ranks = set(range(world_size))
        self._rounds: dict[int, dict[int, RankRows[Any]]] = {}
        self._num_rounds = 0
        self._end: End | None = None
        self._failure: str | None = None
        self._pulling = asyncio.Lock()
        self._reported = False

    async def part(self, rank: int, index: int) -> RankRows[Any] | End:
        while index >= self._num_rounds and self._end is None:
            async with self._pulling:
                # Check again: another rank may have pulled this round, or failed, meanwhile.
                if index >= self._num_rounds and self._end is None:
                    await self._pull()
        if index >= self._num_rounds:
            assert self._end is not None
            return self._end
        parts = self._rounds.get(index, {})
        if rank not in parts:
            raise ValueError(f"rank {rank} has part {index} of {self._name!r} already, or never")
        part = parts.pop(rank)
        if not parts:
            # This drops the actor's references to the blocks.
            del self._rounds[index]
        return part

    def leave(self, rank: int) -> bool:
        """Count a rank as done with the epoch; return whether all ranks are, which ends it."""
        self._ranks.discard(rank)
        if self._ranks:
            return False
        if self._end is None and self._failure is None:
            self._pipeline.next_block.cancel()
            self._pipeline.stop()
        return True

    async def _pull(self) -> None:
        """Wait for one block, and store the round that it completes."""
        if self._failure is None:
            block = self._pipeline.next_block
            done, _ = await asyncio.wait({block}, timeout=self._notice_after_s)
            if not done:
                await self._notify_of_no_cpu()
                await asyncio.wait({block})
            self._take_block(block)
        if self._failure is not None:
            # A new exception for each rank: a traceback grows with every raise.
            raise StreamError(self._failure)

    def _take_block(self, block: asyncio.Future[Any]) -> None:
        try:
            rows = block.result()
        except Exception as error:
            self._failure = (
                f"{reason_of(error)}: the pipeline of the data set {self._name!r} failed\n\n"
                f"{plain_text(str(error))}"
            )
            self._pipeline.stop()
            return
        if rows is None:
            parts = self._partitioner.finish()
        else:
            self._pipeline.advance()
            parts = self._partitioner.add(rows)
        if parts is not None:
            self._rounds[self._num_rounds] = dict(enumerate(parts))
            self._num_rounds += 1
        if rows is None:
            self._end = End(self._partitioner.rows_in_rounds)
            self._pipeline.stop()

    async def _notify_of_no_cpu(self) -> None:
        """Notify once that no CPU is free. A slow pipeline with free CPUs needs no advice."""
        loop = asyncio.get_running_loop()
        free = await loop.run_in_executor(None, ray.available_resources)
        if free.get("CPU", 0) >= 1 or self._reported:
            return
        self._reported = True
        self._notify(
            f"The pipeline of {self._name!r} has yielded nothing for {self._notice_after_s:g} s, "
            "and no CPU of the cluster is free. Unless its functions are as slow as that, it waits "
            "for CPUs that others hold: ask for fewer workers, or fewer CPUs for each, or add a "
            "node."
        )


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
