"""The driver's mailbox: events of its agents, its own threads and signals, as they arrive."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator

from polytrain.events.driver import DriverEvent
from polytrain.workers.agents.agent_host import Delivery, PoolEvent
from polytrain.workers.agents.calls import AgentEvent

Mailbox = queue.SimpleQueue[Delivery]
"""Any thread may put events into it, and a signal handler: `put` is reentrant."""

_LONGEST_WAIT_S = 1.0
"""Maximum seconds of one wait: a signal just before it doesn't interrupt it."""


def arrived(
    mailbox: Mailbox, timeout_s: float | None = None
) -> Iterator[AgentEvent | DriverEvent | PoolEvent]:
    """Wait for mail for at most a second, and yield all events that have arrived by then.

    What arrives while they are handled is left to the next call. Workers may report as fast as the
    driver handles reports, and only between two calls it looks at deadlines.

    Args:
        mailbox: the mailbox, which only this thread reads.
        timeout_s: seconds to wait, if they are fewer.
    """
    with contextlib.suppress(queue.Empty):
        limit_s = _LONGEST_WAIT_S if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S)
        first = mailbox.get(timeout=limit_s)
        others = mailbox.qsize()
        yield from first
        for _ in range(others):
            yield from mailbox.get_nowait()
