"""What a journal tells of a run, across all the drivers that it has had. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polytrain.run.ledger import Ledger


@dataclass(slots=True)
class Chronicle:
    """A run as its journal has it. What was started over isn't part of it."""

    identity: Mapping[str, Any] = field(default_factory=dict)
    """What mustn't change while the run is one."""

    since_claim: int = 0
    """The claim of the driver that began it."""

    world_size: int = 0
    launches: int = 0
    history: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """Step and metrics of every report of rank 0 that no restart has undone."""

    succeeded: bool | None = None
    """None while nobody has concluded it."""

    stopped: bool = False
    """Whether it was concluded because somebody wanted it to stop."""

    reason: str = ""
    """Why it was concluded so."""

    ledger: Ledger = field(default_factory=Ledger)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """What was reported last."""
        return self.history[-1][1] if self.history else {}


def read_chronicle(journal: str) -> Chronicle | None:
    """Read a journal; None if no driver has ever opened it.

    Lines that are torn, because a writer died, are passed over; so are those of a driver that went
    on after another had taken the run from it.
    """
    chronicle: Chronicle | None = None
    claim = -1
    for entry in _entries(journal):
        if entry["claim"] < claim:
            continue
        if entry["event"] == "Opened":
            claim = entry["claim"]
            if chronicle is None or entry["anew"]:
                chronicle = Chronicle(since_claim=claim)
            chronicle.identity = entry["identity"]
            chronicle.world_size = entry["world_size"]
            chronicle.succeeded, chronicle.stopped, chronicle.reason = None, False, ""
        if chronicle is not None:
            _take(chronicle, entry)
    return chronicle


def _take(chronicle: Chronicle, entry: Mapping[str, Any]) -> None:
    match entry["event"]:
        case "Launched":
            chronicle.launches += 1
            chronicle.history = [told for told in chronicle.history if told[0] <= entry["step"]]
        case "Reported":
            chronicle.history.append((entry["step"], entry["metrics"]))
        case "Concluded":
            chronicle.succeeded, chronicle.reason = entry["succeeded"], entry["reason"]
            chronicle.stopped = entry["stopped"]
    chronicle.ledger.take(entry)


def _entries(journal: str) -> Iterator[dict[str, Any]]:
    for line in journal.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"time", "claim", "event"} <= entry.keys():
            yield entry
