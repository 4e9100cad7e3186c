"""Reads the rows of an agent's rank in the background, and keeps them between attempts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polytrain.workers.processes.loop_thread import in_daemon_thread

if TYPE_CHECKING:
    from polytrain.workers.agents.calls import SharedBytes
    from polytrain.workers.agents.shard_cache import CacheRequest, ShardCache


class RankData:
    """The agent's part of the run's data sets. Its methods run on one event loop."""

    def __init__(self) -> None:
        self._request: CacheRequest | None = None
        self._reading: asyncio.Task[ShardCache] | None = None
        self._fetched: list[object] = []
        """Keeps what was fetched on this node."""

    async def fetch(self, shared: Sequence[SharedBytes]) -> None:
        """Bring what every rank needs to this node, so that a later rank doesn't wait for it.

        That may take long after the loss of a node: Ray asks lost nodes for their copies as well.
        """
        with contextlib.suppress(Exception):  # a rank that needs it raises it
            for each in shared:
                self._fetched.append(await in_daemon_thread(each.fetch))

    def request(self, request: CacheRequest | None) -> None:
        """Start reading a rank's rows, unless they are held already."""
        self._request = request
        self._begin(before=self._reading)

    async def get(self) -> ShardCache | None:
        """Wait for the rows; None if the run has no data.

        Raises:
            Exception: any error of the data set. The next call reads again.
        """
        if self._reading is None:
            return None
        try:
            return await self._reading
        except Exception:
            # Read again: the source may have been unreachable temporarily.
            self._begin(before=None)
            raise

    async def release(self) -> None:
        """Free the memory."""
        self._fetched.clear()
        if self._reading is not None:
            with contextlib.suppress(Exception):  # `get` has raised it
                (await self._reading).release()

    def _begin(self, before: asyncio.Task[ShardCache] | None) -> None:
        if self._request is not None:
            reading = _read(self._request, before)
            self._reading = asyncio.get_running_loop().create_task(reading)


async def _read(request: CacheRequest, before: asyncio.Task[ShardCache] | None) -> ShardCache:
    held = None
    if before is not None:
        with contextlib.suppress(Exception):  # `get` has raised it
            held = await before
    return await in_daemon_thread(_hold, request, held)


def _hold(request: CacheRequest, before: ShardCache | None) -> ShardCache:
    # Import it late: importing Arrow takes a while, and only runs with data need it.
    from polytrain.workers.agents.shard_cache import hold

    return hold(request, before)
