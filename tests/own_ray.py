"""A Ray of a test's process, without the processes of Ray that no test needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

IDLE_MS = 600_000
"""By default Ray ends idle workers after a second. The next test would start others, for seconds
of imports."""


@contextmanager
def own_ray(**options: Any) -> Iterator[None]:
    """Have a Ray of this machine.

    Nobody asks its dashboard anything, which runs even if it isn't included: `ray.init` waits for
    it. What monitors logs would send them to the driver, which doesn't want them.
    """
    import ray
    from ray._private.node import Node

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "start_api_server", lambda *_, **__: None)
        patch.setattr(Node, "start_log_monitor", lambda _: None)
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _system_config={"idle_worker_killing_time_threshold_ms": IDLE_MS},
            **options,
        )
    try:
        yield
    finally:
        ray.shutdown()
