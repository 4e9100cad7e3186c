"""The page that a run gets when it ends: it never fails the run, and short runs have none."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from tests.unit.record.recorded import RUN, journal

import polytrain
from polytrain import (
    Checkpoint,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.storage.location import Location
from polytrain.view.page.ending import MOST_REPORTS, NAME, WRITTEN_AFTER_S, write_at_end


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / "journal.jsonl").write_bytes(b"".join(journal(RUN)))
    return run


def test_a_run_that_took_a_while_gets_a_page(run: Path) -> None:
    # A directory may have a name that no text in UTF-8 has.
    run = run.rename(run.with_name(os.fsdecode(b"run\xff")))
    write_at_end(Location.of(run), wall_s=WRITTEN_AFTER_S, reports=3)
    assert "Finished in 13.0 s" in (run / NAME).read_text()


@pytest.mark.parametrize(
    ("wall_s", "reports"), [(WRITTEN_AFTER_S - 1, 3), (WRITTEN_AFTER_S, MOST_REPORTS + 1)]
)
def test_a_run_that_would_feel_it_gets_none(wall_s: float, reports: int, run: Path) -> None:
    write_at_end(Location.of(run), wall_s=wall_s, reports=reports)
    assert not (run / NAME).exists()


@pytest.mark.parametrize("obstacle", ["a directory", "a broken journal"])
def test_what_keeps_it_from_being_written_is_only_logged(
    obstacle: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if obstacle == "a directory":
        (run / NAME / "inner").mkdir(parents=True)
    else:
        (run / "journal.jsonl").write_text('{"time": 1, "token": 1, "event": "Opened"}\n')
    with caplog.at_level(logging.WARNING):
        write_at_end(Location.of(run), wall_s=WRITTEN_AFTER_S, reports=3)
    assert "can't be written" in caplog.text
    assert "polytrain report" in caplog.text


def fail_once(config: dict[str, Any]) -> None:
    saved = polytrain.get_checkpoint()
    (Path(config["work"]) / "state").write_text("1")
    polytrain.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(config["work"]))
    if saved is None:
        raise ValueError("not yet")


def test_a_run_of_two_drivers_that_took_a_while_together(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    trainer = make_trainer(
        "reference",
        fail_once,
        train_loop_config={"work": str(tmp_path / "work")},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, progress=False),
    )
    with pytest.raises(TrainingFailedError):
        trainer.fit()
    file = tmp_path / "run" / "journal.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # As if the first driver had taken its time.
    lines[0]["began"] -= 2 * WRITTEN_AFTER_S
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = trainer.fit()
    text = (tmp_path / "run" / NAME).read_text()
    assert "Finished in 1 min" in text
    assert Result.from_path(result.path).history == result.history
