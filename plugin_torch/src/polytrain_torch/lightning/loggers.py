"""Has Lightning's loggers keep one version of a run over restarts, with each step once.

Rows and events of steps that an attempt repeats are dropped just before its first batch: only then
is the step number known that Lightning logs that batch with. A checkpoint that is saved at the end
of a batch has the number of this batch, and Lightning corrects it later.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from polytrain import get_context
from polytrain_torch.lightning.private import has_version, is_open, log_no_start, set_version
from polytrain_torch.private import drop_events

_Row = dict[str, str]


def keep_version(loggers: Sequence[Any], number: int) -> bool:
    """Name loggers' versions after the run, unless the user has named them.

    Args:
        loggers: the loggers of a trainer.
        number: number of the trainer in the training function, from 1.

    Returns:
        Whether the first one, whose directory is also the trainer's, is named after the run.
    """
    run = get_context().get_experiment_name()
    taken = set()
    named = []
    for logger in loggers:
        if not _is_local(logger) or has_version(logger):
            continue
        count = number
        # Two loggers of a class may have the same name.
        while (type(logger), directory := _named(logger, run, count)) in taken:
            count += 1
        taken.add((type(logger), directory))
        named.append(logger)
    return bool(named) and named[0] is loggers[0]


class KeptLogs:
    """The logs of earlier attempts. Create it on all ranks, before Lightning opens its loggers."""

    def __init__(self, loggers: Iterable[Any]) -> None:
        self._tables: list[KeptTable] = []
        self._events: list[Any] = []
        for logger in loggers:
            # A second call of fit() has the first one's loggers, already open.
            if dist.get_rank() != 0 or not _is_local(logger) or is_open(logger):
                continue
            if isinstance(logger, CSVLogger):
                self._tables.append(KeptTable(logger))
            elif any(Path(logger.log_dir).glob("events.out.tfevents.*")):
                self._events.append(logger)

    def resume(self) -> None:
        """Suppress the values that Lightning logs at each start, at step 0."""
        for logger in self._events:
            log_no_start(logger)

    def drop_from(self, step: int) -> None:
        """Drop the rows and events of this step and later ones: they are logged again."""
        for table in self._tables:
            table.drop_from(step)
        for logger in self._events:
            drop_events(logger.experiment, step)


class KeptTable:
    """Keeps the existing table of a `CSVLogger`, which would delete it."""

    def __init__(self, logger: CSVLogger) -> None:
        self._logger = logger
        self._path = Path(logger.log_dir, "metrics.csv")
        aside = self._path.with_name("metrics.csv.earlier")
        # If `aside` exists already, an earlier attempt was killed here.
        if self._path.exists():
            os.replace(self._path, aside)
        self._earlier = 0
        if aside.exists():
            _cut_torn_line(aside)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Experiment logs directory .* not empty")
                writer = logger.experiment
            os.replace(aside, self._path)
            writer.metrics_keys, rows = _read(self._path)
            self._earlier = len(rows)

    def drop_from(self, step: int) -> None:
        """Drop earlier rows of this step and later ones, and rows that were logged again."""
        if not self._earlier:
            return
        self._logger.save()
        columns, rows = _read(self._path)
        earlier, later = rows[: self._earlier], rows[self._earlier :]
        again = {_place(row) for row in later}
        kept = [row for row in earlier if _step(row) < step and _place(row) not in again]
        new = self._path.with_name("metrics.csv.new")
        with new.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows([*kept, *later])
        os.replace(new, self._path)


def _is_local(logger: Any) -> bool:
    is_kind = isinstance(logger, CSVLogger | TensorBoardLogger)
    return is_kind and "://" not in str(logger.save_dir)


def _named(logger: Any, run: str, number: int) -> str:
    """Set the version of a logger, and return its directory."""
    set_version(logger, run if number == 1 else f"{run}-{number}")
    return str(logger.log_dir)


def _cut_torn_line(table: Path) -> None:
    """Cut off an incomplete last line, left by a killed process."""
    with table.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _read(table: Path) -> tuple[list[str], list[_Row]]:
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        return list(reader.fieldnames or ()), rows


def _step(row: _Row) -> float:
    try:
        return float(row["step"])
    except ValueError:
        # The user may log any object as the step. Keep such a row.
        return -1


def _place(row: _Row) -> tuple[str, ...]:
    """Identify a row by step and columns: a batch's and an epoch's row may have the same step."""
    return (row["step"], *(name for name, value in row.items() if value))
