"""The run's job in memory that all worker processes of a node map.

A training function may hold a lot: a closure over an array, say. Through each worker process's
socket it would be copied several times per rank, and again by each restart.
"""

from __future__ import annotations

import mmap
import os
import pickle

from polytrain.workers.session.job import WorkerJob


class JobMemory:
    """The pickled job, once per node."""

    def __init__(self, pickled: bytes) -> None:
        self.descriptor = os.memfd_create("polytrain-job")
        with os.fdopen(self.descriptor, "wb", closefd=False) as file:
            file.write(pickled)

    def close(self) -> None:
        """Free the memory that no worker process maps."""
        os.close(self.descriptor)


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
