"""Runs on a file system that can be made to fail at any call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.committed import Committed, intact_checkpoints
from tests.faulty_storage import Fault, FaultyFileSystem, never

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    make_trainer,
)
from polytrain.checkpoint.store import CheckpointStore
from polytrain.storage.location import Location
from polytrain.testing.contract import kit_table

ROUNDS = 3
KEPT = 2


@dataclass
class Run:
    """One run on a file system that can be made to fail."""

    root: Path
    retry_s: float = 0.0
    max_failures: int = 0
    kept: int = KEPT

    def __post_init__(self) -> None:
        self.filesystem = FaultyFileSystem(self.root)
        self.committed = Committed()
        self.directory = self.root / "runs" / "one"

    def trainer(self) -> Trainer:
        return make_trainer(
            "reference",
            rounds=ROUNDS,
            label="label",
            datasets={"train": kit_table()},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(
                name="one",
                storage_path="runs",
                storage_filesystem=self.filesystem,
                storage_timeout_s=self.retry_s,
                failure_config=FailureConfig(max_failures=self.max_failures),
                checkpoint_config=CheckpointConfig(num_to_keep=self.kept, checkpoint_frequency=1),
                observers=(self.committed,),
                progress=False,
            ),
        )

    def fit(self, fault: Fault = never) -> Result:
        """Train. Calls of the file system count from here on."""
        trainer, faults = self.trainer(), self.filesystem.faults
        faults.calls.clear()
        faults.fault = fault
        try:
            return trainer.fit()
        finally:
            faults.fault = never

    def accepted(self) -> set[str]:
        """What somebody else takes for checkpoints now."""
        run = Location.of("runs/one", FaultyFileSystem(self.root))
        store = CheckpointStore(location=run)
        found = store.find(since_token=0).manifests
        return {manifest.directory for manifest in found if not store.damage(manifest)}

    def assert_nothing_is_lost(self) -> None:
        """What was committed is there, and what is taken for a checkpoint is one."""
        intact = intact_checkpoints(self.directory)
        assert self.accepted() <= intact
        for committed in self.committed.directories:
            newer = [directory for directory in intact if age(directory) > age(committed)]
            assert committed in intact or len(newer) >= self.kept, f"{committed} is missing"


def age(directory: str) -> list[int]:
    """Sorts checkpoints by what came first: driver, attempt, number."""
    number, attempt = directory.removeprefix("checkpoint_").split("-")
    return [*map(int, attempt.split(".")), int(number)]
