"""A node has a job once, however many worker processes read it."""

from __future__ import annotations

import errno
import os
import pickle

import pytest

from polytrain.workers.session.job import JobMemory, unpickled_job


def test_all_agents_get_the_same_memory() -> None:
    value = {"weights": os.urandom(1 << 20)}
    memory = JobMemory(pickle.dumps(value))
    descriptor = memory.descriptor
    # As worker processes do, each with a descriptor of its own.
    assert [unpickled_job(os.dup(descriptor)) for _ in range(2)] == [value, value]
    memory.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(descriptor)


def test_a_job_that_can_not_be_read_leaves_nothing_open() -> None:
    memory = JobMemory(b"this is no pickle")
    mine = os.dup(memory.descriptor)
    with pytest.raises(pickle.UnpicklingError):
        unpickled_job(mine)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(mine)
    memory.close()
