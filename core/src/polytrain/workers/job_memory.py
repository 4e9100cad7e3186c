"""The run's job in memory that all worker processes of a node map.

A training function may hold a lot: a closure over an array, say. Through each worker process's
socket it would be copied several times per rank, and again by each restart.
"""

from __future__ import annotations

import mmap
import os
import pickle

from polytrain.workers.job import WorkerJob


class JobMemory:
    """The pickled job, once per node. Its methods run on one event loop."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def keep(self, pickled: bytes) -> int:
        """Return the descriptor of the memory with the job, which is the same for the whole run."""
        if self._descriptor is None:
            descriptor = os.memfd_create("polytrain-job")
            try:
                with os.fdopen(descriptor, "wb", closefd=False) as file:
                    file.write(pickled)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        return self._descriptor

    def close(self) -> None:
        """Free the memory that no worker process maps."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def unpickled_job(descriptor: int) -> WorkerJob:
    """Return the job in the memory behind a descriptor, which is closed.

    Raises:
        Exception: any error of what the job holds.
    """
    try:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
            job: WorkerJob = pickle.loads(memory)
            return job
    finally:
        os.close(descriptor)
