"""The ranks of a run: where each was, what it had, and how it fared. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOverview:
    """One rank, in the last attempt that had it."""

    rank: int
    attempts: int
    """Attempts that had it."""

    failures: int
    """Attempts that ended because of it."""

    straggled: int
    """How often it was named as a straggler."""

    host: str | None
    """The address of its node; None in journals that don't have it."""

    node: str | None
    """The name of its node; None if it hasn't joined, and in journals that don't have it."""

    device: str | None
    """What it computes on, such as "CPU" or a GPU's name; None as with its node."""

    gpus: int
    rows: Mapping[str, int]
    """Data set → its rows, without those that weren't counted."""

    busy: float | None
    """Share of the time in which its main thread didn't wait for others, over all windows that were
    measured: between 0 and 1."""

    memory: int | None
    """The most resident bytes of its process at the end of a window."""

    @property
    def place(self) -> str:
        """The name of its node, with its address unless that is this machine's own."""
        if self.node is None or self.host is None or self.host.startswith("127."):
            return self.node or self.host or ""
        return f"{self.node} ({self.host})"

    @property
    def computes_on(self) -> str:
        """Its device, or how many GPUs it has if that is all that is known."""
        return self.device or (f"{self.gpus} x GPU" if self.gpus else "")

    @property
    def rows_in_short(self) -> str:
        """Its rows, with the names of the data sets if there are several."""
        if len(self.rows) == 1:
            return str(*self.rows.values())
        return ", ".join(f"{name} {rows}" for name, rows in self.rows.items())


@dataclass(slots=True)
class _Rank:
    attempts: int = 0
    failures: int = 0
    straggled: int = 0
    host: str | None = None
    node: str | None = None
    device: str | None = None
    gpus: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    busy: float = 0.0
    """The sum of its shares, over all windows."""

    windows: int = 0
    memory: int | None = None


def ranks_of(entries: Iterable[Mapping[str, Any]]) -> tuple[RankOverview, ...]:
    """Read the ranks of a run, over all its drivers, from the entries of its journal."""
    found: dict[int, _Rank] = defaultdict(_Rank)
    size = 0
    for entry in entries:
        match entry["event"]:
            case "Opened" if entry["anew"]:
                found.clear()
                size = 0
            case "Launched":
                size = max(size, entry["world_size"])
                _launched(found, entry)
            case "Joined" if "rank" in entry:
                rank = found[entry["rank"]]
                rank.node, rank.device = entry.get("node"), entry.get("device")
                rank.rows = entry.get("rows", {})
            case "Load":
                _loaded(found, entry)
            case "Straggler":
                found[entry["rank"]].straggled += 1
            case "AttemptEnded" if entry.get("failure") and entry["failure"]["rank"] is not None:
                found[entry["failure"]["rank"]].failures += 1
    return tuple(_overview(number, found[number]) for number in range(size))


def _launched(found: dict[int, _Rank], entry: Mapping[str, Any]) -> None:
    hosts, gpus = entry.get("hosts", ()), entry.get("gpus", ())
    for number in range(entry["world_size"]):
        rank = found[number]
        rank.attempts += 1
        # It may be in a different place than before.
        rank.node = rank.device = None
        if number < len(hosts):
            rank.host = hosts[number]
        if number < len(gpus):
            rank.gpus = gpus[number]


def _loaded(found: dict[int, _Rank], entry: Mapping[str, Any]) -> None:
    # Journals of earlier versions have a line for each.
    windows = entry.get("windows", 1)
    for number, share in enumerate(entry["busy"]):
        found[number].busy += share * windows
        found[number].windows += windows
    for number, taken in enumerate(entry.get("memory", ())):
        found[number].memory = max(taken, found[number].memory or 0)


def _overview(number: int, rank: _Rank) -> RankOverview:
    return RankOverview(
        rank=number,
        attempts=rank.attempts,
        failures=rank.failures,
        straggled=rank.straggled,
        host=rank.host,
        node=rank.node,
        device=rank.device,
        gpus=rank.gpus,
        rows=rank.rows,
        busy=rank.busy / rank.windows if rank.windows else None,
        memory=rank.memory,
    )
