"""The ranks of a run: where each was, and how it fared. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polytrain.errors import Failure
from polytrain.record.entries import (
    AttemptEnded,
    Entry,
    Launched,
    LoadMeasured,
    RankJoined,
    StragglerFound,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOverview:
    """One rank, in the last attempt that had it."""

    rank: int
    attempts: int = 0
    """Attempts that had it."""

    failures: int = 0
    """Attempts that ended because of it."""

    straggled: int = 0
    """How often it was named as a straggler."""

    host: str | None = None
    """The address of its node; None if it is unknown."""

    node: str | None = None
    """The name of its node; None if it hasn't joined."""

    device: str | None = None
    """What it computes on, such as "CPU" or a GPU's name; None if it hasn't joined."""

    gpus: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    """Data set → its rows, without those that weren't counted."""

    busy: float | None = None
    """Share of the time in which its main thread didn't wait for others, over all windows that were
    measured: between 0 and 1."""

    cpu: float | None = None
    """CPUs that all threads of its process used, on average: 2.5 is 250 % in `top`."""

    memory: int | None = None
    """The most resident bytes of its process at the end of a window."""

    gpu: float | None = None
    """Share of the time in which its GPUs computed, on average: between 0 and 1."""

    gpu_memory: int | None = None
    """The most bytes in use of the memory of its GPUs together, by all processes."""

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


class RankRecords:
    """What a run's journal says of each of its ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankOverview] = {}
        self._size = 0
        self._measured: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0])
        """Rank and measure → its sum over windows, and their number."""

    def take(self, entry: Entry) -> None:
        """Take the next entry of the journal, but no report."""
        match entry:
            case Launched():
                self._launched(entry)
            case RankJoined(rank=number):
                self._ranks[number] = replace(
                    self._of(number),
                    node=entry.node or None,
                    device=entry.device or None,
                    rows=entry.rows,
                )
            case LoadMeasured():
                self._loaded(entry)
            case StragglerFound(rank=number):
                rank = self._of(number)
                self._ranks[number] = replace(rank, straggled=rank.straggled + 1)
            case AttemptEnded(failure=Failure(rank=int(number))):
                rank = self._of(number)
                self._ranks[number] = replace(rank, failures=rank.failures + 1)

    def overviews(self) -> tuple[RankOverview, ...]:
        """Return each rank that the run has had."""
        means = {key: total / count for key, (total, count) in self._measured.items() if count}
        return tuple(
            replace(
                self._of(number),
                busy=means.get((number, "busy")),
                cpu=means.get((number, "cpu")),
                gpu=means.get((number, "gpu")),
            )
            for number in range(self._size)
        )

    def _of(self, number: int) -> RankOverview:
        return self._ranks.get(number) or RankOverview(rank=number)

    def _launched(self, entry: Launched) -> None:
        self._size = max(self._size, entry.world_size)
        hosts, gpus = dict(enumerate(entry.hosts)), dict(enumerate(entry.gpus))
        for number in range(entry.world_size):
            before = self._of(number)
            self._ranks[number] = replace(
                before,
                attempts=before.attempts + 1,
                # It may be in a different place than before.
                node=None,
                device=None,
                host=hosts.get(number, before.host) or None,
                gpus=gpus.get(number, before.gpus),
            )

    def _loaded(self, load: LoadMeasured) -> None:
        for number, share in enumerate(load.busy):
            self._measure(number, "busy", share, load.windows)
        for number, cpus in enumerate(load.cpu):
            self._measure(number, "cpu", cpus, load.windows)
        for number, taken in enumerate(load.memory):
            rank = self._of(number)
            self._ranks[number] = replace(rank, memory=max(taken, rank.memory or 0))
        for number, gpus in enumerate(load.gpus):
            for busy, _ in gpus:
                if busy is not None:
                    self._measure(number, "gpu", busy, load.windows)
            in_use = [memory for _, memory in gpus if memory is not None]
            if in_use:
                rank = self._of(number)
                most = max(sum(in_use), rank.gpu_memory or 0)
                self._ranks[number] = replace(rank, gpu_memory=most)

    def _measure(self, number: int, what: str, value: float, windows: int) -> None:
        sums = self._measured[number, what]
        sums[0] += value * windows
        sums[1] += windows
