"""Checkpoints that are validated beside training: what the driver asks for, and what it keeps."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.unit.run.driver import Driver

from polytrain.api.run_handle import Watcher
from polytrain.checkpoint.manager import CheckpointManager
from polytrain.config.configs import CheckpointConfig
from polytrain.config.validation_config import ValidationConfig, ValidationTaskConfig
from polytrain.errors import FailureKind, RunOwnedError
from polytrain.output.observers import Observers
from polytrain.policy.stop_rule import Limit, StopRule
from polytrain.policy.validation import Validation, Validations, ValidationStatus
from polytrain.record.history import read_history
from polytrain.record.journal import Journal
from polytrain.run.attached_work import AttachedWork
from polytrain.validation.coordinator import ValidationCoordinator
from polytrain.validation.validator import NotValidated, Validated, ValidationTask
from polytrain.workers.agents.calls import AgentEvent
from polytrain.workers.session.job import LaunchOrder
from polytrain_plugins import CheckpointInfo, Stopped, hookimpl


class Diary:
    """An observer of validations."""

    def __init__(self) -> None:
        self.validated: list[tuple[int, Any]] = []

    @hookimpl
    def polytrain_checkpoint_validated(self, checkpoint: CheckpointInfo) -> None:
        self.validated.append((checkpoint.step, checkpoint.metrics))


Outcome = Callable[[ValidationTask], Validated | NotValidated]


def number_of(task: ValidationTask) -> int:
    return int(Path(task.checkpoint.path).name.split("_")[1].split("-")[0])


def scored(task: ValidationTask) -> Validated:
    """Checkpoint 1 is the best."""
    return Validated(metrics={"val": -abs(number_of(task) - 1.0)})


@dataclass
class FakeValidator:
    """Calls a function of the test in the driver's process."""

    outcome: Callable[[ValidationTask], Validated | NotValidated]

    def validate(self, task: ValidationTask) -> Validated | NotValidated:
        return self.outcome(task)

    def cancel(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """It holds nothing."""


@dataclass
class ValidatingDriver(Driver):
    """A driver that validates checkpoints, at once."""

    validation: Outcome = scored
    """What becomes of the validation of a checkpoint."""

    validation_config: ValidationConfig = field(
        default_factory=lambda: ValidationConfig(fn=lambda checkpoint: {})
    )

    def attached(self, manager: CheckpointManager, journal: Journal) -> AttachedWork:
        made = ValidationCoordinator(
            config=self.validation_config,
            manager=manager,
            journal=journal,
            mailbox=self.group.mailbox,
        )
        made.validator = FakeValidator(self.validation)
        return made


def driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validation: Outcome = scored, **options: Any
) -> ValidatingDriver:
    """A run of one rank that makes four checkpoints, and asks for all of them to be validated."""
    made = ValidatingDriver(
        tmp_path, monkeypatch, lambda order: life(order), world_size=1, validation=validation
    )
    for name, value in options.items():
        setattr(made, name, value)

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        events: list[AgentEvent] = []
        for number in range(4):
            events += [
                made.reported(0, number + 1),
                made.staged(0, number),
                made.stored(0, number, validation={}, model=str(number)),
            ]
        return [*events, *made.all_done()]

    return made


def lines(path: Path, event: str) -> list[dict[str, Any]]:
    entries = map(json.loads, (path / "journal.jsonl").read_text().splitlines())
    return [entry for entry in entries if entry["event"] == event]


def test_the_score_of_a_validation_decides_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="val")
    run = driver(tmp_path, monkeypatch, checkpoint_config=config)
    assert run.conclude().succeeded
    kept = [(info.step, info.metrics) for info in run.manager.best()]
    # The newest is always kept.
    assert kept == [(2, {"val": 0.0}), (4, {"val": -2.0})]
    assert [report["val"] for report in run.controller.journal.history.reports] == [
        -1.0,
        0.0,
        -1.0,
        -2.0,
    ]
    assert [entry["step"] for entry in lines(tmp_path, "ValidationEnded")] == [1, 2, 3, 4]
    # Until it is validated, no checkpoint lacks its score.
    assert "doesn't rank" not in caplog.text


def test_a_checkpoint_that_waits_for_its_validation_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[list[str]] = []

    def look(task: ValidationTask) -> Validated:
        assert Path(task.checkpoint.path, "model").is_file()
        there.append(sorted(path.name for path in (tmp_path / "checkpoints").iterdir()))
        return Validated(metrics={"val": 1.0})

    run = driver(
        tmp_path, monkeypatch, validation=look, checkpoint_config=CheckpointConfig(num_to_keep=1)
    )
    assert run.conclude().succeeded
    # The last to be validated has no older one beside it but those that have just ended.
    assert len(there) == 4
    assert [info.step for info in run.manager.best()] == [4]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_000003-1.0"]


def test_a_request_is_in_the_journal_before_the_checkpoint_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is killed in between leaves a request without a checkpoint, never the other."""
    run = driver(tmp_path, monkeypatch)
    assert run.conclude().succeeded
    order = [
        (entry["event"], entry["checkpoint"])
        for event in ("ValidationRequested", "Committed")
        for entry in lines(tmp_path, event)
    ]
    text = (tmp_path / "journal.jsonl").read_text()
    for number in range(4):
        name = f"checkpoint_{number:06d}-1.0"
        assert ("ValidationRequested", name) in order
        requested = text.index(f'"ValidationRequested", "checkpoint": "{name}"')
        assert requested < text.index(f'"Committed", "checkpoint": "{name}"')


def failing(task: ValidationTask) -> Validated | NotValidated:
    if number_of(task) == 1:
        return NotValidated(reason="ValueError: no", traceback="Traceback: no\n")
    return scored(task)


def test_a_validation_that_fails_is_logged_and_the_run_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = driver(tmp_path, monkeypatch, validation=failing)
    assert run.conclude().succeeded
    text = "The validation of checkpoint_000001-1.0 (step 2) failed: ValueError: no\nTraceback: no"
    assert text in caplog.text
    assert [entry["status"] for entry in lines(tmp_path, "ValidationEnded")] == [
        "validated",
        "failed",
        "validated",
        "validated",
    ]
    assert "val" not in run.controller.journal.history.reports[1]


def test_a_run_whose_every_validation_failed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch, validation=lambda task: NotValidated(reason="No: no\nat"))
    conclusion = run.conclude()
    assert conclusion.succeeded
    assert conclusion.validation_failure == "all 4 validations failed: No: no"
    history = read_history([(tmp_path / "journal.jsonl").read_bytes()])
    assert history is not None
    assert history.validation_failure == conclusion.validation_failure


@pytest.mark.parametrize("validation", [scored, failing])
def test_a_run_with_a_score_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validation: Outcome
) -> None:
    assert driver(tmp_path, monkeypatch, validation).conclude().validation_failure == ""


def test_a_metric_that_was_reported_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = driver(
        tmp_path, monkeypatch, validation=lambda task: Validated(metrics={"loss": 5.0, "new": 1})
    )

    def life(order: LaunchOrder) -> Sequence[AgentEvent]:
        stored = run.stored(0, 0, validation={}, model="0")
        object.__setattr__(stored, "metrics", {"loss": 1.0})
        return [run.reported(0, 1), run.staged(0, 0), stored, *run.all_done()]

    run.life = life
    assert run.conclude().succeeded
    assert "it returned 'loss', which the report of the checkpoint has already" in caplog.text
    assert run.controller.journal.history.reports[0] == {"loss": 1.0}


def test_a_failed_validation_ends_the_run_if_it_is_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ValidationConfig(fn=lambda checkpoint: {}, on_failure="fail")
    run = driver(
        tmp_path,
        monkeypatch,
        validation=failing,
        validation_config=config,
        checkpoint_config=CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="val"),
        max_failures=-1,
    )
    conclusion = run.conclude()
    assert not conclusion.succeeded
    [failure] = conclusion.failures
    assert failure.kind is FailureKind.VALIDATION
    assert failure.step == 2
    assert "checkpoint_000001-1.0 (step 2) failed: ValueError: no" in failure.message
    assert len(run.group.of("launch")) == 1
    # What is still to be validated, and what has failed, is the next driver's.
    history = read_history([(tmp_path / "journal.jsonl").read_bytes()])
    assert history is not None
    history.validations.retry_failed()
    assert "checkpoint_000001-1.0" in [each.checkpoint for each in history.validations.pending]
    assert Path(tmp_path, "checkpoints", "checkpoint_000001-1.0", "model").is_file()


def test_a_report_adds_to_the_arguments_and_replaces_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[tuple[dict[str, Any], float | None]] = []

    def note(task: ValidationTask) -> Validated:
        got.append((dict(task.fn_kwargs), task.timeout_s))
        return Validated(metrics={})

    default = ValidationTaskConfig(fn_kwargs={"a": 1, "b": 1}, timeout_s=60)
    config = ValidationConfig(fn=lambda checkpoint: {}, task_config=default)
    run = driver(tmp_path, monkeypatch, validation=note, validation_config=config)
    own = {"fn_kwargs": {"b": 2}, "timeout_s": None}
    run.life = lambda order: [
        run.staged(0, 0),
        run.stored(0, 0, validation={}, model="0"),
        run.staged(0, 1),
        run.stored(0, 1, validation=own, model="1"),
        run.staged(0, 2),
        run.stored(0, 2, model="2"),
        *run.all_done(),
    ]
    assert run.conclude().succeeded
    assert got == [({"a": 1, "b": 1}, 60), ({"a": 1, "b": 2}, None)]


@pytest.mark.parametrize("end", ["stop", "lease"])
def test_a_run_that_ends_early_leaves_its_validations_to_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Both happen after the training, while the run waits for validations alone."""

    def end_early(task: ValidationTask) -> Validated:
        assert run.released.wait(60)
        if end == "stop":
            run.stop_requests.request(Stopped(by="observer", reason="enough"))
        else:
            run.lease.lost = RunOwnedError("taken over")
            run.lease.when_lost()
        return scored(task)

    run = driver(tmp_path, monkeypatch, validation=end_early)
    conclusion = run.conclude()
    assert not conclusion.succeeded
    assert (conclusion.stopped is not None) == (end == "stop")
    history = read_history([(tmp_path / "journal.jsonl").read_bytes()])
    assert history is not None
    assert history.validations.pending


def test_a_stop_by_who_sees_the_training_end_ends_the_wait_for_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    class Stopper:
        @hookimpl
        def polytrain_attempt_ended(self) -> None:
            run.stop_requests.request(Stopped(by="observer", reason="enough"))

    def slow(task: ValidationTask) -> Validated:
        assert is_over.wait(60)
        return scored(task)

    run = driver(tmp_path, monkeypatch, validation=slow, observers=Observers([Stopper()]))
    try:
        conclusion = run.conclude()
    finally:
        is_over.set()
    assert conclusion.stopped is not None
    assert not conclusion.succeeded


def test_a_function_that_is_never_used_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = driver(tmp_path, monkeypatch)
    run.life = lambda order: [
        *[run.staged(0, 0), run.stored(0, 0, model="0")],
        *run.all_done(),
    ]
    with caplog.at_level(logging.WARNING):
        assert run.conclude().succeeded
    assert "no checkpoint was validated" in caplog.text
    assert "validation=True" in caplog.text


def test_observers_get_a_validated_checkpoint_with_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary, watcher = Diary(), Watcher()
    observers = Observers([diary, watcher])
    run = driver(tmp_path, monkeypatch, validation=failing, observers=observers)
    assert run.conclude().succeeded
    # No other attempt follows, however long the validations take.
    assert watcher.status.state == "training"
    # The second one has failed.
    assert diary.validated == [(1, {"val": -1.0}), (3, {"val": -1.0}), (4, {"val": -2.0})]


def test_the_next_driver_keeps_what_its_predecessor_has_not_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It deletes what is superseded as it starts, before it has validated anything."""
    first = driver(tmp_path, monkeypatch, checkpoint_config=CheckpointConfig(num_to_keep=1))
    first.validation = None
    assert first.conclude().succeeded
    validations = Validations()
    manager = first.manager
    [newest] = manager.checkpoints
    older = replace(newest, number=0)
    manager.checkpoints = [older, newest]
    manager.validations = validations
    validations.request(Validation(checkpoint=older.directory, step=1))
    assert manager.superseded() == []
    # Also if it has no function: a later one may have it.
    with ValidationCoordinator(config=None, manager=manager, journal=Mock(), mailbox=Mock()) as own:
        assert not own.is_busy
    assert manager.superseded() == []
    validations.end(Validation(checkpoint=older.directory, step=1, status=ValidationStatus.FAILED))
    assert manager.superseded() == [older.directory]


def test_a_validation_whose_checkpoint_a_restart_has_undone_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver(tmp_path, monkeypatch)
    run.validation = None
    assert run.conclude().succeeded
    manager, journal = run.manager, Mock()
    manager.validations = Validations()
    [newest] = manager.checkpoints[-1:]
    manager.validations.request(Validation(checkpoint=newest.directory, step=newest.step))
    is_undone, has_ended = threading.Event(), threading.Event()

    def validate(task: ValidationTask) -> NotValidated:
        assert is_undone.wait(60)
        return NotValidated(reason="FileNotFoundError: it is gone")

    with ValidationCoordinator(
        config=run.validation_config,
        manager=manager,
        journal=journal,
        mailbox=Mock(put=lambda _: has_ended.set()),
    ) as own:
        own.validator = FakeValidator(validate)
        assert own.take() == []
        manager.validations.drop_after(newest.step - 1)
        is_undone.set()
        assert has_ended.wait(60)
        assert own.take() == []
        assert not own.is_busy
    assert own.all_failed == ""
    assert not journal.write.called


def test_a_limit_that_a_validation_meets_is_kept_for_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may die before it concludes the run, and later validations may be worse."""
    rule, watcher = StopRule(limits=(Limit(metric="val", comparison=">=", value=0.0),)), Watcher()
    run = driver(tmp_path, monkeypatch, stop_rule=rule, observers=Observers([watcher]))
    run.conclude()
    assert watcher.status.state == "training"
    [met] = lines(tmp_path, "ConditionMet")
    assert (met["stopped"]["metric"], met["stopped"]["step"]) == ("val", 2)
