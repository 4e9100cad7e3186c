"""Where a run's time went. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Phases of the state machine, as a user calls what happens in them.
_ACCOUNT_OF_PHASE = {
    "Placing": "placing workers",
    "Gathering": "starting trainers",
    "Training": "training",
    "Leaving": "leaving",
    "Ending": "ending failed attempts",
}


@dataclass(slots=True)
class Ledger:
    """Seconds by what they were spent on. The time between two drivers of a run isn't counted."""

    seconds: dict[str, float] = field(default_factory=dict)
    _phase: str | None = field(default=None, repr=False)
    _since: float = field(default=0.0, repr=False)

    @property
    def wall_s(self) -> float:
        """All of it."""
        return sum(self.seconds.values())

    def take(self, entry: Mapping[str, Any]) -> None:
        """Take the next line of the journal."""
        now: float = entry["time"]
        if entry["event"] == "Opened":
            # Nobody knows when the driver before has ended, if it didn't say so.
            self._phase = None
        elif self._phase is not None:
            account = _ACCOUNT_OF_PHASE[self._phase]
            self.seconds[account] = self.seconds.get(account, 0.0) + now - self._since
        phase = entry.get("phase", self._phase)
        self._phase = phase if phase in _ACCOUNT_OF_PHASE else None
        self._since = now

    def __str__(self) -> str:
        width = max(map(len, (*self.seconds, "in all")))
        lines = [f"{account:<{width}}  {spent:10.2f} s" for account, spent in self.seconds.items()]
        return "\n".join([*lines, f"{'in all':<{width}}  {self.wall_s:10.2f} s"])
