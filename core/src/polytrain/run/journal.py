"""The run's journal: one JSON line for every transition, with its reason."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from polytrain.run.events import Event
from polytrain.run.machine import Transition


class Journal:
    """Appends to a file as things happen; each line is written at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Journal:
        # Line buffered: what has been written survives the driver's death.
        self._file = self._path.open("a", buffering=1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def transition(self, event: Event | None, transition: Transition) -> None:
        """Note what an event led to; a transition without a reason changed nothing."""
        if self._file is None or not transition.reason:
            return
        entry = {
            "time": time.time(),
            "event": type(event).__name__ if event is not None else "Begun",
            "phase": type(transition.state.phase).__name__,
            "generation": transition.state.generation,
            "reason": transition.reason,
        }
        self._file.write(json.dumps(entry) + "\n")
