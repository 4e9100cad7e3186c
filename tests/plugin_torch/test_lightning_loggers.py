"""What a restart keeps of the table of Lightning's `CSVLogger`."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from polytrain_torch.lightning.loggers import KeptTable


def logger_of(directory: Path) -> CSVLogger:
    return CSVLogger(directory, name="", version="run")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Of an attempt that has logged three batches, and an epoch at the second one."""
    logger = logger_of(tmp_path)
    for step in range(3):
        logger.log_metrics({"loss": step}, step)
        if step == 1:
            logger.log_metrics({"error": 0.5}, step)
    logger.save()
    return tmp_path / "run/metrics.csv"


def places(table: Path) -> list[tuple[str, ...]]:
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(row["step"], *(name for name in ("loss", "error") if row[name])) for row in rows]


def restarted(table: Path) -> tuple[CSVLogger, KeptTable]:
    logger = logger_of(table.parent.parent)
    return logger, KeptTable(logger)


@pytest.mark.filterwarnings("error")
def test_rows_from_a_step_on_are_replaced(table: Path) -> None:
    logger, kept = restarted(table)
    kept.drop_from(2)
    logger.log_metrics({"loss": 7}, 2)
    logger.save()
    assert places(table) == [("0", "loss"), ("1", "loss"), ("1", "error"), ("2", "loss")]


def test_a_row_that_comes_again_before_the_first_batch_is_there_once(table: Path) -> None:
    logger, kept = restarted(table)
    logger.log_metrics({"error": 0.25}, 1)
    kept.drop_from(2)
    assert places(table) == [("0", "loss"), ("1", "loss"), ("1", "error")]
    assert "0.25" in table.read_text()


def test_a_column_that_is_new_after_the_restart_keeps_the_rows(table: Path) -> None:
    logger, kept = restarted(table)
    kept.drop_from(2)
    logger.log_metrics({"loss": 7, "rate": 0.1}, 2)
    logger.save()
    assert [place[0] for place in places(table)] == ["0", "1", "1", "2"]


def test_a_line_that_was_written_in_part_is_dropped(table: Path) -> None:
    table.write_bytes(table.read_bytes() + b"0.5,")
    logger, kept = restarted(table)
    kept.drop_from(3)
    logger.log_metrics({"loss": 7}, 3)
    logger.save()
    assert [place[0] for place in places(table)] == ["0", "1", "1", "2", "3"]


def test_a_kill_while_the_table_was_aside_loses_no_row(table: Path) -> None:
    table.rename(table.with_name("metrics.csv.earlier"))
    _, kept = restarted(table)
    kept.drop_from(3)
    assert [place[0] for place in places(table)] == ["0", "1", "1", "2"]


def test_a_row_whose_step_is_no_number_is_kept(table: Path) -> None:
    logger, kept = restarted(table)
    kept.drop_from(0)
    logger.experiment.log_metrics({"loss": 7}, "last")
    logger.save()
    _, kept = restarted(table)
    kept.drop_from(0)
    assert places(table) == [("last", "loss")]
