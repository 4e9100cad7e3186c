"""The runs that are killed: a small training whose end state shows everything that went wrong.

The state depends on every row that was used, and on their order, to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tests.crash.evidence import Evidence

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    make_trainer,
)
from polytrain_plugins import Attempt, CheckpointInfo, RunInfo, hookimpl

STEPS = 6
KEPT = 2
RUN = "run"

_ROWS, _BATCH = 20, 5
_SIZE = 9000
"""Numbers in the state: its file is large enough for a snapshot to be a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A way to run the training."""

    name: str
    workers: int = 0
    written_by: Literal["rank_0", "every_rank"] = "rank_0"
    bucket: str | None = None
    """Of an S3 server that the environment names; None for a directory."""

    scored: bool = False
    """Whether the best checkpoints are kept rather than the newest."""

    stumbles: bool = False
    """Whether the training function fails once in each driver, and is restarted."""

    def storage(self, directory: Path) -> str:
        """What holds the run of a case with this directory."""
        return f"s3://{self.bucket}/{directory.name}" if self.bucket else str(directory / "runs")

    def evidence(self, directory: Path) -> Evidence:
        """What lies there now."""
        return Evidence.read(f"{self.storage(directory)}/{RUN}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diary:
    """What happened to a run, as those tell whom it happened to, in the order of their telling."""

    path: Path

    def write(self, what: str, **fields: Any) -> None:
        """Add an entry; it survives the process."""
        line = json.dumps({"what": what, **fields}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def entries(self, *kinds: str) -> list[dict[str, Any]]:
        """The entries of these kinds."""
        if not self.path.exists():
            return []
        messages = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [entry for entry in messages if entry["what"] in kinds]

    @classmethod
    def of(cls, directory: Path) -> Diary:
        """That of a case."""
        return cls(path=directory / "diary")


class _Witness:
    """An observer that compares what it is told with what lies in the storage."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self._scenario = scenario
        self._directory = directory
        self._diary = Diary.of(directory)

    @hookimpl
    def polytrain_attempt_started(self, run: RunInfo, attempt: Attempt) -> None:
        newest = self._scenario.evidence(self._directory).newest
        given = attempt.checkpoint
        self._diary.write(
            "started",
            attempt=attempt.number,
            checkpoint=given.rpartition("/")[2] if given else None,
            newest=newest.directory if newest else None,
            part_staged=self._handed_in(),
            step=newest.step if newest else 0,
        )

    @hookimpl
    def polytrain_checkpoint_committed(self, run: RunInfo, checkpoint: CheckpointInfo) -> None:
        directory = checkpoint.path.rpartition("/")[2]
        score = checkpoint.metrics["score"]
        self._diary.write("committed", directory=directory, score=score)

    def _handed_in(self) -> int:
        """The last step whose checkpoint everybody who has to has handed over."""
        steps = {rank: 0 for rank in range(max(1, self._scenario.workers))}
        if self._scenario.written_by == "rank_0":
            steps = {0: 0}
        for entry in self._diary.entries("handed in"):
            if entry["rank"] in steps:
                steps[entry["rank"]] = entry["step"]
        return min(steps.values())


def fit(scenario: Scenario, directory: Path) -> None:
    """Run, or go on with, a case's training; its outcome ends up in the diary.

    Raises:
        Exception: what `fit` does.
    """
    score = "score" if scenario.scored else None
    config = RunConfig(
        name=RUN,
        storage_path=scenario.storage(directory),
        failure_config=FailureConfig(max_failures=2),
        checkpoint_config=CheckpointConfig(
            num_to_keep=KEPT,
            checkpoint_score_attribute=score,
            written_by=scenario.written_by,
        ),
        observers=(_Witness(scenario, directory),),
        progress=False,
    )
    result = make_trainer(
        "reference",
        train,
        train_loop_config={"directory": str(directory), "stumbles": scenario.stumbles},
        datasets={"train": {"x": [float(row) for row in range(_ROWS)]}},
        dataset_config={"train": DataConfig(shuffle=True, seed=7)},
        scaling_config=ScalingConfig(num_workers=scenario.workers),
        run_config=config,
    ).fit()
    read = Result.from_path(result.path, checkpoint_config=config.checkpoint_config)
    Diary.of(directory).write("ended", result=_reported(result), read=_reported(read))


def _reported(result: Result) -> dict[str, Any]:
    def directory(checkpoint: Checkpoint | None) -> str | None:
        return checkpoint.path.rpartition("/")[2] if checkpoint else None

    return {
        "history": list(result.history),
        "metrics": result.metrics,
        "checkpoint": directory(result.checkpoint),
        "best": [directory(checkpoint) for checkpoint, _ in result.best_checkpoints],
    }


def train(config: Mapping[str, Any]) -> None:
    """Fold batch after batch into a state, and report it every time."""
    context = polytrain.get_context()
    rank = context.get_world_rank()
    diary = Diary.of(Path(config["directory"]))
    state, step = np.zeros(_SIZE), 0
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is not None:
        state, step = _loaded(Path(checkpoint.path), rank)
    shard = polytrain.get_dataset_shard("train")
    while step < STEPS:
        for batch in shard.iter_batches(global_batch_size=_BATCH):
            step += 1
            state = np.roll(state, 1) / 3 + batch["x"].sum()
            if config["stumbles"] and (step, context.get_attempt()) == (4, 0):
                raise RuntimeError("stumbled")
            with tempfile.TemporaryDirectory() as directory:
                _save(Path(directory), rank, state, step)
                polytrain.report(
                    {"step": step, "rows": batch["x"].tolist(), "score": step * 4 % 7},
                    checkpoint=Checkpoint.from_directory(directory),
                )
            diary.write("handed in", rank=rank, step=step)
            if step == STEPS:
                break


def _save(directory: Path, rank: int, state: np.ndarray[Any, Any], step: int) -> None:
    np.save(directory / f"state-{rank}.npy", state)
    found = {"step": step, "sha256": hashlib.sha256(state.tobytes()).hexdigest()}
    (directory / "reported").mkdir()
    (directory / "reported" / f"rank-{rank}.json").write_text(json.dumps(found))


def _loaded(directory: Path, rank: int) -> tuple[np.ndarray[Any, Any], int]:
    # Where one rank writes, it is everybody's.
    writer = rank if (directory / f"state-{rank}.npy").exists() else 0
    state = np.load(directory / f"state-{writer}.npy")
    reported = json.loads((directory / "reported" / f"rank-{writer}.json").read_text())
    if hashlib.sha256(state.tobytes()).hexdigest() != reported["sha256"]:
        raise ValueError(f"training was given a torn checkpoint: {directory}")
    return state, reported["step"]
