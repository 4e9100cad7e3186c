"""What a journal tells of a run, across all the drivers that it has had. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polytrain.common.errors import RunFormatError
from polytrain.run.journal import FORMAT
from polytrain.run.ledger import Ledger


@dataclass(slots=True)
class RunHistory:
    """A run as its journal has it. What was started over isn't part of it."""

    identity: Mapping[str, Any] = field(default_factory=dict)
    """What mustn't change while the run is one."""

    since_token: int = 0
    """The lease of the driver that began it."""

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


def read_history(journal: str) -> RunHistory | None:
    """Read a journal; None if no driver has ever opened it.

    Lines that are torn, because a writer died, are passed over; so are those of a driver that went
    on after another had taken the run from it.
    """
    run_history: RunHistory | None = None
    token = -1
    for entry in _entries(journal):
        if entry["token"] < token:
            continue
        if entry["event"] == "Opened":
            if entry.get("format") != FORMAT:
                raise RunFormatError(entry.get("format"), FORMAT)
            token = entry["token"]
            if run_history is None or entry["anew"]:
                run_history = RunHistory(since_token=token)
            run_history.identity = entry["identity"]
            run_history.world_size = entry["world_size"]
            run_history.succeeded, run_history.stopped, run_history.reason = None, False, ""
        if run_history is not None:
            _take(run_history, entry)
    return run_history


def _take(run_history: RunHistory, entry: Mapping[str, Any]) -> None:
    match entry["event"]:
        case "Launched":
            run_history.launches += 1
            run_history.history = [each for each in run_history.history if each[0] <= entry["step"]]
        case "Reported":
            run_history.history.append((entry["step"], entry["metrics"]))
        case "Concluded":
            run_history.succeeded, run_history.reason = entry["succeeded"], entry["reason"]
            run_history.stopped = entry["stopped"]
    run_history.ledger.take(entry)


def _entries(journal: str) -> Iterator[dict[str, Any]]:
    for line in journal.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("event") == "Opened" and "claim" in entry:
            raise RunFormatError(1, FORMAT)
        if isinstance(entry, dict) and {"time", "token", "event"} <= entry.keys():
            yield entry
