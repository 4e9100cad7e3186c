"""Who hears of a run while it lasts: everybody gets each entry of its journal."""

from __future__ import annotations

from collections.abc import Callable

from polytrain.record.entries import Entry

Take = Callable[[Entry], None]
"""Takes an entry, in the thread that has written it. It waits for nothing, and never raises."""


class News:
    """Passes each entry on, in order, once it is written and the run's record has it.

    Reports of ranks above 0 come too, whether or not the journal keeps them.
    """

    def __init__(self) -> None:
        self._subscribers: list[Take] = []

    def subscribe(self, take: Take) -> None:
        """Have each later entry passed on."""
        self._subscribers.append(take)

    def publish(self, entry: Entry) -> None:
        """Pass an entry on to all that have subscribed."""
        for take in self._subscribers:
            take(entry)
