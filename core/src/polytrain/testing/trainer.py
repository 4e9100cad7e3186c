"""The trainer tier: whole runs, in which a worker process gets a real SIGKILL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    FailureKind,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    ValidationConfig,
)
from polytrain.testing.contract import ROWS, kit_table
from polytrain.testing.faults import Fault
from polytrain.testing.functions import STEPS, LoadsModel, count_steps, validate_step
from polytrain.testing.injection import FaultPlan, WithFaults
from polytrain.testing.local_world import run_world
from polytrain.testing.processes import leftovers, mark_processes, our_processes
from polytrain_plugins import Backend, CheckpointKind, Report, hookimpl
from polytrain_plugins.returned import total_steps_of

_HANG_TIMEOUT_S = 60.0
_RENDEZVOUS_TIMEOUT_S = 120.0
"""A run that hangs fails after this time, with the stacks of its ranks."""


class TrainerTier:
    """Tests of a backend in whole runs."""

    backend: Backend

    def test_run_reports_and_checkpoints(self, tmp_path: Path) -> None:
        """History has every report of rank 0; the newest checkpoint has the files of its kind.

        If this fails: `capabilities.checkpoint` doesn't say which ranks write.
        """
        result = self._fit(tmp_path)
        assert [metrics["step"] for metrics in result.history] == list(range(1, STEPS + 1))
        assert result.metrics == result.history[-1]
        assert result.error is None
        assert result.checkpoint is not None
        every_rank = self.backend.capabilities.checkpoint is CheckpointKind.EVERY_RANK
        names = {path.name for path in Path(result.checkpoint.path).glob("step-*")}
        assert names == ({"step-0", "step-1"} if every_rank else {"step-0"})

    def test_checkpoints_are_validated_beside_training(self, tmp_path: Path) -> None:
        """Each checkpoint is validated once in a process of its own, also if a worker is killed.

        If this fails: a module of `demand().preload` breaks a process that doesn't join.
        """
        result = self._fit(
            tmp_path,
            fault=Fault(rank=0, at_step=2),
            max_failures=1,
            validation_config=ValidationConfig(fn=validate_step),
        )
        assert result.restarts == 1
        committed = [metrics for _, metrics in reversed(result.best_checkpoints)]
        assert [each for each in result.history if "validated_step" in each] == committed
        assert committed[-1] == result.metrics
        assert all(metrics["validated_step"] == metrics["step"] for metrics in committed)
        processes = {metrics["validated_by"] for metrics in committed}
        assert len(processes - {os.getpid()}) == len(committed)

    def test_a_declarative_model_is_validated(self, tmp_path: Path) -> None:
        """If declared: a validation loads the model that was saved, and its metrics are kept.

        If this fails: `load` needs more than the files that `save` has written; or another process
        can't read the run, because `total_steps` is no whole number.
        """
        if not self.backend.capabilities.declarative:
            return
        mark_processes()
        result = Trainer(
            self.backend,
            datasets={"train": kit_table()},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=tmp_path, progress=False),
            validation_config=ValidationConfig(fn=LoadsModel(self.backend)),
        ).fit()
        assert result.metrics["model_loaded"]
        assert result.metrics == result.best_checkpoints[0][1]
        assert Result.from_path(result.path).metrics == result.metrics

    def test_killed_worker_is_replaced(self, tmp_path: Path) -> None:
        """After a SIGKILL the run resumes from the last checkpoint, reported just before.

        If this fails: something of the dead attempt blocks the next one, for example a fixed
        port.
        """
        result = self._fit(tmp_path, fault=Fault(rank=0, at_step=2), max_failures=1)
        assert result.restarts == 1
        assert [metrics["step"] for metrics in result.history] == list(range(1, STEPS + 1))
        resumed_from = result.history[-1]["resumed_from"]
        if self.backend.capabilities.checkpoint is CheckpointKind.ONE_RANK:
            assert resumed_from == 2
        else:
            # The other rank may not have reported yet: then this checkpoint wasn't complete.
            assert resumed_from <= 2

    def test_declarative_run_survives_a_kill(self, tmp_path: Path) -> None:
        """If declared: a SIGKILL in the middle of training loses no saved round.

        With `exact_resume` the final files are also the same as without a kill.

        If this fails: `train` doesn't resume from `session.checkpoint`, or has a state that `save`
        doesn't write or `load` doesn't restore.
        """
        if not self.backend.capabilities.declarative:
            # The contract tier shows that an undeclared capability is rejected.
            return
        attempts = _Attempts()
        plan = FaultPlan(directory=tmp_path, faults=(Fault(rank=0, at_step=3),))
        trainer = Trainer(
            WithFaults(inner=self.backend, plan=plan),
            datasets={"train": kit_table()},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=tmp_path,
                failure_config=_failure_config(max_failures=1),
                checkpoint_config=CheckpointConfig(checkpoint_frequency=1),
                observers=(attempts, plan.clock),
                progress=False,
            ),
        )
        mark_processes()
        result = trainer.fit()
        assert result.restarts == 1
        steps = [report.step for report in attempts.reports]
        is_one_ranks = self.backend.capabilities.checkpoint is CheckpointKind.ONE_RANK
        if not is_one_ranks and steps[2:4] == [3, 3]:
            # The other rank may not have reported yet: then this checkpoint wasn't complete.
            del steps[3]
        assert steps == list(range(1, len(steps) + 1)), "a round was repeated or skipped"
        assert len(result.history) == len(steps)
        total = total_steps_of(self.backend)
        assert total is None or total >= len(steps), "total_steps is less than there are"
        assert result.load_model() is not None
        if self.backend.capabilities.exact_resume:
            undisturbed = run_world(self.backend, data=kit_table(), path=tmp_path / "undisturbed")
            assert result.checkpoint is not None
            assert undisturbed.saved(0)
            for name, content in undisturbed.saved(0).items():
                assert Path(result.checkpoint.path, name).read_bytes() == content, name

    def test_exception_reaches_the_caller(self, tmp_path: Path) -> None:
        """An exception of the training function ends the run, with the rank's own traceback.

        If this fails: `joined` or `offering` changes the exception.
        """
        with pytest.raises(TrainingFailedError) as caught:
            self._fit(tmp_path, fault=Fault(rank=1, at_step=1, kind="exception"))
        failure = next(f for f in caught.value.failures if f.rank == 1)
        assert failure.kind is FailureKind.USER_ERROR
        assert "InjectedError" in failure.traceback

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        """After a run, however it ended, no process, resource or variable of it is left.

        If this fails: the engine starts processes in their own sessions.
        """
        mark_processes()
        environment, alive = dict(os.environ), _CountProcesses()
        good = self._fit(tmp_path / "good", observers=(alive,))
        with pytest.raises(TrainingFailedError):
            self._fit(tmp_path / "bad", fault=Fault(rank=0, at_step=1))
        assert alive.seen >= 3, "a run should consist of a zygote and two worker processes"
        assert leftovers(Path(good.path)) == []
        assert dict(os.environ) == environment

    def test_inline(self, tmp_path: Path) -> None:
        """With `num_workers=0` this process does the same: reports, checkpoints, all rows.

        If this fails: the engine needs more than one rank, or leaves something in the process that
        breaks a second run.
        """
        for attempt in ("first", "second"):
            result = self._fit(tmp_path / attempt, num_workers=0)
            assert [metrics["step"] for metrics in result.history] == list(range(1, STEPS + 1))
            assert result.metrics["rows"] == ROWS
            assert result.checkpoint is not None

    def _fit(
        self,
        path: Path,
        *,
        num_workers: int = 2,
        fault: Fault | None = None,
        max_failures: int = 0,
        observers: tuple[Any, ...] = (),
        validation_config: ValidationConfig | None = None,
    ) -> Result:
        mark_processes()
        # With a training function, options for declarative training must be unset.
        trainer = Trainer(
            type(self.backend)(),
            count_steps,
            train_loop_config={"fault": fault, "validation": validation_config is not None},
            datasets={"train": kit_table()},
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(
                storage_path=path,
                failure_config=_failure_config(max_failures=max_failures),
                observers=observers,
                progress=False,
            ),
            validation_config=validation_config,
        )
        return trainer.fit()


def _failure_config(*, max_failures: int) -> FailureConfig:
    return FailureConfig(
        max_failures=max_failures,
        hang_timeout_s=_HANG_TIMEOUT_S,
        hang_action="kill",
        rendezvous_timeout_s=_RENDEZVOUS_TIMEOUT_S,
    )


class _Attempts:
    """An observer that records rank 0's reports of all attempts."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        self.reports.append(report)


class _CountProcesses:
    """An observer that counts the run's processes during the run."""

    def __init__(self) -> None:
        self.seen = 0

    @hookimpl
    def polytrain_reported(self) -> None:
        self.seen = max(self.seen, len(our_processes()))
