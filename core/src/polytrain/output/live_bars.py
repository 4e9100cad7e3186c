"""Progress bars of the ranks as they are now, for whoever shows them while they move."""

from __future__ import annotations

import threading


class LiveBars:
    """The bars of each rank. One thread notes them, another shows them."""

    def __init__(self) -> None:
        self.are_shown = False
        """Whether somebody shows them; else nobody has to say how they move."""

        self._lock = threading.Lock()
        self._rows: dict[int, tuple[str, ...]] = {}

    def put(self, rank: int, rows: tuple[str, ...]) -> None:
        """Note a rank's bars, from the top; no rows if it has none any more."""
        with self._lock:
            if rows:
                self._rows[rank] = rows
            else:
                self._rows.pop(rank, None)

    def clear(self) -> None:
        """Forget all bars: their writers are gone."""
        with self._lock:
            self._rows.clear()

    def rows(self) -> list[tuple[int, str]]:
        """Return all bars with their ranks, in the order of the ranks."""
        with self._lock:
            return [(rank, row) for rank, rows in sorted(self._rows.items()) for row in rows]
