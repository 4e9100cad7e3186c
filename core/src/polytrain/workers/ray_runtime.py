"""The Ray that a run uses: the user's own, or one that is started for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from polytrain.workers.ray_address import address_to_join


def is_running() -> bool:
    """Whether this process is connected to Ray."""
    return bool(ray.is_initialized())


@contextmanager
def running_ray() -> Iterator[None]:
    """Have Ray initialised; shut it down again if it wasn't before.

    Raises:
        InvalidJobError: `RAY_ADDRESS` names a cluster of which nobody answers.
    """
    if is_running():
        yield
        return
    # Ray announces a change of this default at every start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # As `ray.init()` would: a cluster that RAY_ADDRESS or `ray start` names is joined.
    ray.init(
        address_to_join(os.environ),
        configure_logging=True,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()
