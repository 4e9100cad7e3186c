"""Writes the journal of a run, as drivers do, without a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from polytrain.events.attempt import Reported
from polytrain.policy.validation import ValidationStatus
from polytrain.record.configuration import Configuration
from polytrain.record.entries import (
    CheckpointCommitted,
    Entry,
    Launched,
    LoadMeasured,
    Opened,
    RunConcluded,
    ValidationEnded,
    ValidationRequested,
)
from polytrain.record.history import JOURNAL, RunHistory, entries, read_history
from polytrain.record.journal import Journal, News
from polytrain.storage.location import Location


class JournalWriter:
    """Writes the journal of a run, as a controller does.

    A killed driver closes nothing: the `with` block closes the journals of all drivers.
    """

    def __init__(self, directory: Path, follow: Callable[[Any], None] | None = None) -> None:
        self.follow = follow or (lambda entry: None)
        self.storage = Location.of(directory).open()
        self.values = count()
        self.token = self.step = self.committed = 0
        self.asked: list[int] = []
        self.taken: list[Entry] = []
        """Entries of the current driver, as trackers are given them."""

        self.journal: Journal | None = None
        self.attempt = self.loads = 0
        self._journals = ExitStack()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._journals.close()

    def do(self, event: str) -> None:
        if event == "driver" or self.journal is None:
            self._open()
        assert self.journal is not None
        match event:
            case "report":
                self.step += 1
                # Repeated steps have other values: only the last ones count.
                metrics = {"value": {"of": next(self.values)}, "step": self.step}
                self.journal.report(Reported(attempt=0, rank=0, step=self.step, metrics=metrics))
            case "commit" if self.step > self.committed:
                self.committed = self.step
                self.journal.write(CheckpointCommitted(checkpoint=f"c{self.step}", step=self.step))
                self.journal.write(
                    ValidationRequested(checkpoint=f"c{self.step}", step=self.step, task={})
                )
                self.asked.append(self.step)
            case "validate" if self.asked:
                step = self.asked.pop()
                self.journal.write(
                    ValidationEnded(
                        checkpoint=f"c{step}",
                        step=step,
                        status=ValidationStatus.VALIDATED,
                        metrics={"accuracy": next(self.values)},
                        reason="",
                    )
                )
            case "load":
                self.loads += 1
                busy, memory = [0.5, 0.25], [2_000_000, 1_000_000]
                self.journal.write(
                    LoadMeasured(
                        attempt=0,
                        window=self.loads,
                        busy=busy,
                        cpu=[2.5, 0.25],
                        memory=memory,
                        gpus=[[], [(0.75, 40_000_000_000), (None, 7_000_000)]],
                    )
                )
            case "restart":
                self._launch()

    def finish(self) -> None:
        if self.journal is None:
            self._open()
        assert self.journal is not None
        self.journal.write(RunConcluded(stopped=None, succeeded=True, reason="all ranks are done"))

    def _open(self) -> None:
        if self.journal is not None:
            self.journal._log.sync()
        self.token += 1
        self.taken.clear()
        history = read_history(self.storage.read_log(JOURNAL))
        news = News()
        news.subscribe(self._take)
        journal = Journal(self.storage, token=self.token, news=news)
        self.journal = self._journals.enter_context(journal)
        self.journal.write(
            Opened(
                anew=history is None,
                identity={"backend": "reference", "options": {"rounds": 3}},
                world_size=1,
                configuration=Configuration(hyperparameters={"lr": 0.1}),
            )
        )
        self._launch()

    def _take(self, entry: Entry) -> None:
        self.taken.append(entry)
        self.follow(entry)

    def _launch(self) -> None:
        assert self.journal is not None
        self.attempt += 1
        self.step = self.committed
        self.journal.write(Launched(attempt=self.attempt, step=self.step, start=None, world_size=1))

    def history(self) -> RunHistory:
        history = read_history(self.storage.read_log(JOURNAL))
        assert history is not None
        return history

    def entries(self) -> Iterator[Entry]:
        return entries(self.storage.read_log(JOURNAL))
