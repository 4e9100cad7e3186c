"""Connects a run to Ray: the user's, or one that is started for the run."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import ray

from polytrain.workers.ray.address import address_to_join, mismatch_problem
from polytrain_plugins import InvalidJobError


def is_running() -> bool:
    """Return whether this process is connected to Ray."""
    return bool(ray.is_initialized())


@dataclass(slots=True)
class _Use:
    """The use of this process's Ray by runs in any of its threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    runs: int = 0
    is_ours: bool = False
    """Whether Ray was started for a run."""


_use = _Use()


@contextmanager
def running_ray() -> Iterator[None]:
    """Keep Ray initialised; if a run has started it, the last run to leave shuts it down.

    Raises:
        InvalidJobError: `RAY_ADDRESS` names a cluster that doesn't answer.
    """
    with _use.lock:
        if not is_running():
            _start()
            _use.is_ours = True
        _use.runs += 1
    try:
        yield
    finally:
        with _use.lock:
            _use.runs -= 1
            if _use.is_ours and not _use.runs:
                _use.is_ours = False
                ray.shutdown()


def _start() -> None:
    # Ray announces a change of this default at every start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Like `ray.init()`, this joins a cluster that RAY_ADDRESS or `ray start` names.
    try:
        ray.init(
            address_to_join(os.environ),
            configure_logging=True,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except RuntimeError as error:
        problem = mismatch_problem(str(error))
        if problem is None:
            raise
        # Ray is only half connected.
        ray.shutdown()
        raise InvalidJobError((problem,)) from error
