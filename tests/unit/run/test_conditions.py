"""Whether a run of the same name has met its conditions already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from polytrain.api.config_checks import run_config_problems
from polytrain.backends.reference import Reference
from polytrain.config.configs import FailureConfig, RunConfig
from polytrain.config.run_spec import RunSpec
from polytrain.policy.divergence import DivergenceRule
from polytrain.policy.stop_rule import Limit, StopRule
from polytrain.policy.validation import Validation, ValidationStatus
from polytrain.record.history import RunHistory
from polytrain.record.reports import Reports
from polytrain.run.resume import already_met, function_fingerprint, unreported
from polytrain_plugins import Report, Stopped


def rule(**limits: Any) -> StopRule:
    return StopRule(
        limits=tuple(
            Limit(metric=name, comparison=order, value=value)
            for name, (order, value) in limits.items()
        )
    )


def reports(*losses: float) -> Reports:
    made = Reports()
    for step, loss in enumerate(losses, 1):
        made.add(step, {"loss": loss})
    return made


LOSSES = (0.9, 0.5, 0.2, 0.3)
MET = rule(loss=("<=", 0.2)).limit_met_by(3, {"loss": 0.2})
ENDED = RunHistory(reports=reports(*LOSSES), succeeded=True, stopped=MET, condition=MET)
"""Its condition was met at step 3; the next checkpoint came with step 4."""


@pytest.mark.parametrize(
    ("now", "is_met"),
    [
        (rule(loss=("<=", 0.2)), True),
        (rule(loss=("<=", 0.25)), True),
        (rule(loss=("<=", 0.1)), False),
        (rule(training_iteration=(">=", 4)), True),
        (rule(training_iteration=(">=", 5)), False),
        # Step 2 is not what the run ended with.
        (rule(loss=(">=", 0.5)), False),
        (StopRule(), False),
    ],
)
def test_a_limit_that_lies_further_on_resumes_the_run(now: StopRule, is_met: bool) -> None:
    assert (already_met(now, ENDED, start_step=0) is not None) == is_met


def before(report: Report) -> bool:
    return report.step > 1


def after(report: Report) -> bool:
    return report.step > 2


def test_a_function_is_recognised_by_its_code() -> None:
    stopped = Stopped(by="condition", reason="", condition="before", step=2)
    history = RunHistory(
        reports=reports(0.9, 0.5),
        succeeded=True,
        stopped=stopped,
        condition=stopped,
        stop_function=function_fingerprint(before),
    )
    assert already_met(StopRule(function=before), history, start_step=2) == stopped
    assert already_met(StopRule(function=after), history, start_step=2) is None


@pytest.mark.parametrize(("start_step", "is_met"), [(0, False), (2, False), (3, True), (4, True)])
def test_a_driver_that_died_counts_with_what_it_has_committed(
    start_step: int, is_met: bool
) -> None:
    """Steps after the last checkpoint are trained again, and meet the condition again."""
    history = RunHistory(reports=reports(*LOSSES), condition=MET)
    found = already_met(rule(loss=("<=", 0.2)), history, start_step=start_step)
    assert (found is not None) == is_met


@pytest.mark.parametrize(("start_step", "is_met"), [(2, False), (3, True), (4, True)])
def test_the_newest_validation_counts_too(start_step: int, is_met: bool) -> None:
    """It is of step 3, and the run has gone on to step 4 meanwhile."""
    history = RunHistory(reports=reports(*LOSSES))
    for step, value in ((1, 9), (3, 5)):
        task = Validation(checkpoint=f"c{step}", step=step, task={})
        history.validations.request(task)
        ended = replace(task, status=ValidationStatus.VALIDATED, metrics={"val": value})
        history.validations.end(ended)
    found = already_met(rule(val=("<=", 6)), history, start_step=start_step)
    assert (found is not None) == is_met
    assert already_met(rule(val=("<=", 4)), history, start_step=start_step) is None
    assert already_met(rule(val=(">=", 9)), history, start_step=start_step) is None


def test_a_run_that_was_interrupted_beyond_the_limit_is_over() -> None:
    history = RunHistory(reports=reports(*LOSSES))
    assert already_met(rule(training_iteration=(">=", 2)), history, start_step=4) is not None
    assert already_met(rule(training_iteration=(">=", 2)), history, start_step=2) is None


def test_time_of_all_drivers_counts() -> None:
    history = RunHistory()
    history.ledger.seconds.update(train=50.0, replayed_work=5.0, checkpoint_stall=5.0, start=99.0)
    assert already_met(StopRule(time_budget_s=60), history, start_step=0) is not None
    assert already_met(StopRule(time_budget_s=61), history, start_step=0) is None


def test_a_metric_that_is_never_reported_is_reported_with_the_nearest() -> None:
    made = reports(0.5)
    made.add(2, {"valid": {"auc": 0.5}, "note": "0.1", "accuracy": 0.5})
    names = {"los": ("<=", 1), "valid/auc": (">=", 1), "valid/acc": (">=", 1), "note": ("<=", 1)}
    messages = list(
        unreported(
            rule(loss=("<=", 0), training_iteration=(">=", 9), **names),
            DivergenceRule(names=("loss", "valid/auc"), spikes={"los": 4}),
            made,
        )
    )
    assert [each.partition(" was")[0] for each in messages] == [
        "RunConfig.stop['los']",
        "RunConfig.stop['valid/acc']",
        "RunConfig.stop['note']",
        messages[-1],
    ]
    assert messages[-1].startswith("FailureConfig.divergence never saw 'los': no report of rank 0")
    assert "Did you mean 'loss'?" in messages[0]
    assert list(unreported(rule(los=("<=", 1)), None, Reports())) == []


def changes(config: Any, rollback: Any) -> Any:
    return config


async def unawaited(reports: Any) -> bool:
    return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "loss"}, "divergence: nothing uses it with on_divergence=None"),
        ({"on_rollback": changes}, "on_rollback: nothing uses it with on_divergence=None"),
        (
            {"on_divergence": "fail", "on_rollback": changes},
            "on_rollback: nothing uses it with on_divergence='fail'",
        ),
        (
            {"on_divergence": "rollback", "on_rollback": lambda: None},
            "on_rollback: <lambda>() can't be called with a configuration and a rollback",
        ),
        (
            {"on_divergence": "rollback", "on_rollback": changes},
            "no params that on_rollback could change. Use 'fail'",
        ),
        ({"on_divergence": "rollback"}, "no params that on_rollback could change. Use 'fail'"),
        (
            {"on_divergence": "fail", "divergence": unawaited},
            "divergence: calling unawaited makes a coroutine and decides nothing",
        ),
        (
            {"on_divergence": "fail", "divergence": lambda: True},
            "divergence: <lambda>() is called with one argument, the list of the last reports",
        ),
    ],
)
def test_options_of_divergence_that_can_do_nothing_are_named(
    options: dict[str, Any], message: str
) -> None:
    run = RunConfig(failure_config=FailureConfig(**options))
    [problem] = run_config_problems(RunSpec(backend=Reference(), run_config=run))
    assert message in str(problem)


class Boosts(Reference):
    params: ClassVar[dict[str, Any]] = {}


def test_a_rollback_of_boosting_needs_other_params() -> None:
    """Wherever the rows are read from."""

    def problems(**failures: Any) -> list[str]:
        run = RunConfig(failure_config=FailureConfig(on_divergence="rollback", **failures))
        return [*map(str, run_config_problems(RunSpec(backend=Boosts(), run_config=run)))]

    [problem] = problems()
    assert "on_rollback" in problem
    assert problems(on_rollback=changes) == []


def test_a_training_function_can_leave_batches_out() -> None:
    run = RunConfig(failure_config=FailureConfig(on_divergence="rollback"))
    spec = RunSpec(backend=Reference(), train_loop_per_worker=lambda: None, run_config=run)
    assert list(run_config_problems(spec)) == []
