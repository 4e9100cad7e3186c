"""The stream of a `ray.data.Dataset`: its pipeline runs while the ranks consume what it yields.

One actor per data set, `RayStream`, executes the pipeline and deals its blocks; only references
pass through it. A rank's agent fetches its rows from the object store with `read_part`, and tells
in this way how fast the pipeline may go: what nobody has asked for fills the object store up to
Ray Data's own limit, and stays there until it is wanted.

Blocks come in the pipeline's order. Where the pipeline is deterministic, so are the rows of every
rank; where it isn't (a shuffle without a seed, a join, a repartition by keys, and a sort, which
cuts its blocks elsewhere each time), an epoch that is taken up in its middle may give rows again
and leave others out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polytrain.data.plan.stream_partitioner import Part, Segment, StreamPartitioner
from polytrain.data.read.ray_pipeline import (
    Pipeline,
    allow_blocking_get,
    executors_of_this_process,
    plain_rows,
    plain_text,
    prepared,
    reason_of,
)
from polytrain.data.types.columns import empty_table
from polytrain.data.types.schemas import conformed
from polytrain.data_errors import ReadError


class StreamError(Exception):
    """The pipeline of a data set failed. The message is that of the function that raised."""


class SupersededError(StreamError):
    """A newer attempt has begun; what this one asks for is of no use to anybody."""


@dataclass(frozen=True, slots=True)
class End:
    """The epoch has no further parts."""

    rows: int
    """Rows that were dealt in this leg, over all ranks; `dealing.rank_total` has each rank's."""


class RayStream:
    """The actor. An attempt asks for epochs, and each of its ranks for the parts of an epoch.

    Every rank asks for the indices 0, 1, 2, … of an epoch, each once and at its own pace; a rank
    that asks for a part of a later epoch is done with the former ones. An epoch may begin ahead of
    time, to have its pipeline started when it is wanted.
    """

    def __init__(
        self, name: str, dataset: Any, held: Mapping[str, float], notice_after_s: float
    ) -> None:
        """
        Args:
            name: the data set's name, for messages.
            dataset: the `ray.data.Dataset`; its user's own isn't touched, since this is a copy.
            held: resources that the workers hold, all of them together.
            notice_after_s: seconds that ranks wait for a block before the reason is logged.
        """
        self._name = name
        self._dataset = dataset
        self._held = held
        self._notice_after_s = notice_after_s
        self._attempt = -1
        self._epochs: dict[int, _Epoch] = {}
        self._notices: asyncio.Queue[str] = asyncio.Queue()
        allow_blocking_get()
        # Ray Data reads some settings from the process instead of the dataset.
        type(dataset.context)._set_current(dataset.context)

    async def begin(
        self, attempt: int, epoch: int, legs: tuple[Segment, ...], world_size: int
    ) -> None:
        """Start an epoch, unless another rank has. A new attempt ends all that runs.

        Only a shuffle, or whatever else takes all blocks at once, goes on until it is through: Ray
        Data can't stop it. Killing the actor does, and so a new actor for every attempt is the
        surer way.

        Args:
            attempt: the attempt that asks.
            epoch: number of the epoch, for pipelines that shuffle differently each time.
            legs: what was consumed of the epoch already.
            world_size: ranks of this attempt.

        Raises:
            SupersededError: this attempt isn't the newest.
        """
        if attempt > self._attempt:
            stop_executors = executors_of_this_process()
            for former in self._epochs.values():
                former.cancel()
            self._epochs.clear()
            self._attempt = attempt
            # Waits for threads of Ray Data; nobody has to wait with it.
            asyncio.get_running_loop().run_in_executor(None, stop_executors)
        self._check_attempt(attempt)
        if epoch not in self._epochs:
            self._epochs[epoch] = _Epoch(
                name=self._name,
                pipeline=Pipeline(prepared(self._dataset, epoch, self._held)),
                dealing=StreamPartitioner(world_size, legs),
                world_size=world_size,
                tell=self._notices.put_nowait,
                notice_after_s=self._notice_after_s,
            )

    async def next_part(self, attempt: int, epoch: int, rank: int, index: int) -> Part[Any] | End:
        """The part of one rank in one round. Waits until the pipeline has yielded it.

        Raises:
            StreamError: the pipeline failed.
            SupersededError: this attempt isn't the newest, or stopped being it.
        """
        self._check_attempt(attempt)
        for number, former in list(self._epochs.items()):
            if number < epoch and former.leave(rank):
                del self._epochs[number]
        return await self._epochs[epoch].part(rank, index)

    async def notices(self) -> AsyncIterator[str]:
        """What the user should know, as it happens: that the pipeline waits for resources."""
        while True:
            yield await self._notices.get()

    def _check_attempt(self, attempt: int) -> None:
        if attempt != self._attempt:
            raise SupersededError(
                f"Attempt {attempt} asked for rows of {self._name!r}, which attempt "
                f"{self._attempt} reads now."
            )


def start_stream(
    name: str, dataset: Any, held: Mapping[str, float], *, notice_after_s: float = 20.0
) -> Any:
    """Start the actor on this node. It owns the blocks: with it they are gone.

    Args:
        name: the data set's name.
        dataset: a `ray.data.Dataset`.
        held: resources that the workers hold, all of them together.
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


def read_part(part: Part[Any], schema: pa.Schema) -> pa.Table:
    """Fetch the rows of a part. Blocks on this node are not copied.

    Args:
        part: as `RayStream.next_part` gives it.
        schema: columns to have, and their types.

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
    """An epoch of one attempt: rounds that some rank has yet to take, and the rest to come."""

    def __init__(
        self,
        *,
        name: str,
        pipeline: Pipeline,
        dealing: StreamPartitioner[Any],
        world_size: int,
        tell: Callable[[str], None],
        notice_after_s: float,
    ) -> None:
        self._name = name
        self._pipeline = pipeline
        self._dealing = dealing
        self._tell = tell
        self._notice_after_s = notice_after_s
        self._ranks = set(range(world_size))
        self._rounds: dict[int, dict[int, Part[Any]]] = {}
        self._dealt = 0
        self._end: End | None = None
        self._failure: StreamError | None = None
        self._pulling = asyncio.Lock()
        self._reported = False

    async def part(self, rank: int, index: int) -> Part[Any] | End:
        while index >= self._dealt and self._end is None:
            async with self._pulling:
                # Another rank may have pulled as far, or failed, meanwhile.
                if index >= self._dealt and self._end is None:
                    await self._pull()
        if index >= self._dealt:
            assert self._end is not None
            return self._end
        return self._take(rank, index)

    def leave(self, rank: int) -> bool:
        """One rank is done with the epoch. Whether all are, with which it ends."""
        self._ranks.discard(rank)
        if self._ranks:
            return False
        self.cancel()
        return True

    def cancel(self) -> None:
        if self._end is None and self._failure is None:
            self._failure = SupersededError(f"The epoch of {self._name!r} was broken off.")
            self._pipeline.next_block.cancel()
            self._pipeline.stop()
        self._rounds.clear()

    def _take(self, rank: int, index: int) -> Part[Any]:
        parts = self._rounds.get(index, {})
        if rank not in parts:
            self._raise_failure()
            raise ValueError(f"rank {rank} has part {index} of {self._name!r} already, or never")
        part = parts.pop(rank)
        if not parts:
            # The actor's references to the blocks go with it.
            del self._rounds[index]
        return part

    async def _pull(self) -> None:
        """Wait for one block, and deal the round that it completes."""
        if self._failure is None:
            await self._wait()
        if self._failure is None:
            self._deal()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            # A new one for each rank: a traceback grows with every raise.
            raise type(self._failure)(*self._failure.args)

    async def _wait(self) -> None:
        block = self._pipeline.next_block
        done, _ = await asyncio.wait({block}, timeout=self._notice_after_s)
        if not done:
            await self._tell_why()
            await asyncio.wait({block})

    def _deal(self) -> None:
        try:
            rows = self._pipeline.next_block.result()
        except Exception as error:
            self._fail(error)
            return
        if rows is None:
            parts = self._dealing.finish()
        else:
            self._pipeline.advance()
            parts = self._dealing.add(rows)
        if parts is not None:
            self._rounds[self._dealt] = dict(enumerate(parts))
            self._dealt += 1
        if rows is None:
            self._end = End(self._dealing.rows_dealt)
            self._pipeline.stop()

    def _fail(self, error: Exception) -> None:
        text = plain_text(str(error))
        self._failure = StreamError(
            f"{reason_of(error)}: the pipeline of the data set {self._name!r} failed\n\n{text}"
        )
        self._pipeline.stop()

    async def _tell_why(self) -> None:
        """Say that no CPU is free, once. A slow pipeline with CPUs to spare needs no advice."""
        loop = asyncio.get_running_loop()
        free = await loop.run_in_executor(None, ray.available_resources)
        if free.get("CPU", 0) >= 1 or self._reported:
            return
        self._reported = True
        self._tell(
            f"The pipeline of {self._name!r} has yielded nothing for {self._notice_after_s:g} s, "
            "and no CPU of the cluster is free. Unless its functions are as slow as that, it waits "
            "for CPUs that others hold: ask for fewer workers, or fewer CPUs for each, or add a "
            "node."
        )
