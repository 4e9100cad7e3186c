"""Watches for draining nodes. It asks every few seconds, because Ray doesn't send notices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ray.exceptions import RayError

from polytrain.ray_api.state import draining_nodes

logger = logging.getLogger(__name__)

_LOOK_S = 2.0
"""Seconds between two requests. Notices come at least half a minute ahead."""


class NodeWatch:
    """Reports each draining node once, from its own thread."""

    def __init__(self, tell: Callable[[frozenset[str]], None]) -> None:
        """
        Args:
            tell: called with the nodes that weren't draining before.
        """
        self._tell = tell
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="polytrain-nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        # Longer only if Ray doesn't answer. What the thread tells then is of no use to anybody.
        self._thread.join(_LOOK_S)

    def _watch(self) -> None:
        known: frozenset[str] = frozenset()
        is_reported = False
        while not self._ended.wait(_LOOK_S):
            try:
                draining = draining_nodes()
            except (RayError, OSError, RuntimeError) as error:
                if not is_reported:
                    logger.warning("Ray doesn't list draining nodes now: %s", error)
                is_reported = True
                continue
            if draining - known:
                self._tell(draining - known)
            known |= draining
