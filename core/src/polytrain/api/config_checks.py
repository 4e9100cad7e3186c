"""What is wrong with a run's configuration: values that clash, and conditions that end no run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polytrain import satellites
from polytrain.api.backend_checks import frequency_problems
from polytrain.config.configs import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain.config.constraints import typed_problems
from polytrain.config.loop_config import accepts, written
from polytrain.config.run_spec import RunSpec
from polytrain.config.runtime_env import runtime_env_problems
from polytrain.functions.function_checks import deferred_problems, pickle_problems
from polytrain.output.observers import follow_record, observers_problems
from polytrain.policy.stop_rule import STEP, limit_of
from polytrain.text.described import is_whole, numbered
from polytrain.text.metrics import is_good_when_small
from polytrain_plugins import Backend, Problem
from polytrain_plugins.type_names import quoted


def config_problems(scaling: Any, run: Any) -> Iterator[Problem]:
    """Yield what is wrong with the configuration, whatever the data and the cluster are."""
    of_fields = [
        *typed_problems("scaling_config", scaling, ScalingConfig),
        *typed_problems("run_config", run, RunConfig),
    ]
    yield from of_fields
    if isinstance(scaling, ScalingConfig):
        wrong = {problem.field.removeprefix("ScalingConfig.") for problem in of_fields}
        for problem in _clashes(scaling, wrong):
            # One problem of a value is enough.
            if problem.field.removeprefix("ScalingConfig.") not in wrong:
                yield problem
    if isinstance(scaling, ScalingConfig) and isinstance(run, RunConfig):
        if getattr(run.failure_config, "stragglers", "") == "replace" and scaling.standby == 0:
            yield Problem(
                field="FailureConfig.stragglers",
                what="'replace' moves a straggler to a standby, and there is no standby",
                remedy="Set ScalingConfig(standby=1), or use 'report'",
            )
        if isinstance(run.worker_runtime_env, Mapping):
            is_inline = scaling.num_workers == 0
            yield from runtime_env_problems(run.worker_runtime_env, is_inline=is_inline)


def run_config_problems(spec: RunSpec) -> Iterable[Problem]:
    """Yield what is wrong with those fields of a `RunConfig` that take objects and functions."""
    run: Any = spec.run_config
    if not isinstance(run, RunConfig):
        return
    yield from frequency_problems(spec)
    yield from observers_problems(run.observers)
    if follow_record(run.track, run.observers):
        yield from satellites.trackers.tracker_problems(run.track, run.observers)
    if run.callbacks != ():
        yield from satellites.callbacks.callback_problems(run.callbacks)
    yield from stop_problems(run)
    if isinstance(run.failure_config, FailureConfig):
        yield from _divergence_problems(spec, run.failure_config)


def _divergence_problems(spec: RunSpec, config: FailureConfig) -> Iterator[Problem]:
    """Yield options of divergence that do nothing, or can't."""
    unused = ("divergence", "on_rollback") if config.on_divergence is None else ("on_rollback",)
    for name in unused if config.on_divergence != "rollback" else ():
        if getattr(config, name) is not None:
            yield Problem(
                field=f"FailureConfig.{name}",
                what=f"nothing uses it with on_divergence={config.on_divergence!r}",
                remedy="Set on_divergence='rollback', or leave it out",
            )
    rule = config.divergence
    if config.on_divergence and callable(rule) and not isinstance(rule, type):
        if not accepts(rule, None):
            yield Problem(
                field="FailureConfig.divergence",
                what=f"{written(rule)} is called with one argument, the list of the last reports",
                remedy="Let it take one argument: a list of dicts of metrics, the newest last",
            )
        yield from deferred_problems("FailureConfig.divergence", rule, effect="and decides nothing")
        yield from pickle_problems(
            "FailureConfig.divergence",
            rule,
            remedy="Create such objects inside the function, or decide by the reports",
        )
    if config.on_divergence == "rollback":
        yield from _rollback_problems(spec, config.on_rollback)


def _rollback_problems(spec: RunSpec, function: Any) -> Iterator[Problem]:
    """Yield why a rollback could change nothing: neither the batches nor the configuration."""
    backend: Backend | None = spec.backend
    is_declarative = (
        backend is not None
        and backend.capabilities.declarative
        and spec.train_loop_per_worker is None
        and backend.program(max_failures=0) is None
    )
    if function is not None and not accepts(function, None, None):
        yield Problem(
            field="FailureConfig.on_rollback",
            what=f"{written(function)} can't be called with a configuration and a rollback",
            remedy="Pass a function of these two",
        )
    elif is_declarative and not hasattr(backend, "params"):
        assert backend is not None
        yield Problem(
            field="FailureConfig.on_divergence",
            what="'rollback' can't leave batches out without a training function, as each step "
            f"reads all rows, and the backend {backend.name!r} has no params that on_rollback "
            "could change",
            remedy="Use 'fail', or pass a training function that reports every few batches",
        )
    elif is_declarative and function is None:
        yield Problem(
            field="FailureConfig.on_divergence",
            what="'rollback' can't leave batches out: each round is trained on all rows",
            remedy="Pass on_rollback=…, which returns other params, or use 'fail'",
        )
    if function is not None:
        yield from deferred_problems(
            "FailureConfig.on_rollback", function, effect="and changes nothing"
        )


def _clashes(scaling: ScalingConfig, wrong: set[str]) -> Iterator[Problem]:
    """Yield the clashes between values.

    Args:
        wrong: fields whose value is wrong by itself.
    """
    count = scaling.num_workers
    if count == 0:
        yield from _inline_problems(scaling, wrong)
    elif not sys.platform.startswith("linux"):
        yield Problem(
            field="ScalingConfig.num_workers",
            what=f"worker processes need Linux, this is {sys.platform}",
            remedy="Use num_workers=0 here",
        )
    if not wrong & {"num_workers", "placement_strategy"} and isinstance(count, tuple):
        strategy = scaling.placement_strategy
        if strategy.startswith("STRICT_"):
            yield Problem(
                field="ScalingConfig.placement_strategy",
                what=f"{strategy} needs a fixed number of workers, not {count}",
                remedy=f"Use {strategy.removeprefix('STRICT_')!r}",
            )
    if not wrong & {"virtual_workers", "num_workers"} and scaling.virtual_workers is not None:
        yield from _virtual_problems(scaling, scaling.virtual_workers)
    if not wrong & {"resources_per_worker", "accelerator_type", "use_gpu"}:
        yield from _resource_problems(scaling)
    if not wrong & {"label_selector", "num_workers"} and count != 0:
        yield from _label_problems(scaling)


def _inline_problems(scaling: ScalingConfig, wrong: set[str]) -> Iterator[Problem]:
    labels = None if "label_selector" in wrong else scaling.label_selector
    for field, is_given, why in (
        ("use_gpu", scaling.use_gpu, "which polytrain gives no GPU"),
        ("standby", scaling.standby, "which no standby can replace"),
        ("label_selector", any(labels or ()), "wherever it is"),
    ):
        if is_given:
            yield Problem(
                field=f"ScalingConfig.{field}",
                what=f"num_workers=0 trains in this process, {why}",
                remedy="Use num_workers=1, or leave it out",
            )


def _virtual_problems(scaling: ScalingConfig, count: int) -> Iterator[Problem]:
    most = scaling.max_workers
    if most > count:
        yield Problem(
            field="ScalingConfig.virtual_workers",
            what=f"{numbered(count, 'virtual worker')} can't be shared by {most} workers",
            remedy=f"Use virtual_workers={most} or more, or at most {numbered(count, 'worker')}",
        )


def _resource_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    given = scaling.resources_per_worker or {}
    if scaling.use_gpu and given.get("GPU") == 0:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what="it is True, and resources_per_worker gives a worker no GPU",
            remedy="Leave 'GPU' out of resources_per_worker, or use use_gpu=False",
        )
    if not any(scaling.resources.values()):
        yield Problem(
            field="ScalingConfig.resources_per_worker",
            what=f"{dict(given)} gives a worker no resources",
            remedy='Give at least one, for example {"CPU": 1}',
        )


def _label_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    field, selectors = "ScalingConfig.label_selector", scaling.label_selector
    if selectors is None or isinstance(selectors, Mapping):
        return
    if not isinstance(scaling.num_workers, int) or scaling.standby:
        yield Problem(
            field=field,
            what="a list has a selector for each worker, and the workers of an elastic run and "
            "standbys replace each other",
            remedy="Give one dict for all workers, or a fixed num_workers without standbys",
        )
    elif len(selectors) != scaling.num_workers:
        yield Problem(
            field=field,
            what=f"it has {numbered(len(selectors), 'selector')} for "
            f"{numbered(scaling.num_workers, 'worker')}",
            remedy="Give one for each worker, or one dict for all of them",
        )


_FIELD = "RunConfig.stop"
_EXAMPLE = '{"loss": "<= 0.1", "training_iteration": 100}'

_TIMES = ("time_total_s", "time_this_iter_s", "time_since_restore")
"""Metrics that Ray Tune adds to each report, which are about time."""


def stop_problems(run: Any) -> Iterator[Problem]:
    """Yield what is wrong with a run's conditions."""
    if not isinstance(run, RunConfig) or run.stop is None:
        return
    stop: Any = run.stop
    if isinstance(stop, Mapping):
        if not stop:
            yield Problem(
                field=_FIELD,
                what="it has no limit",
                remedy=f"Give limits, for example {_EXAMPLE}, or None",
            )
        for name, limit in stop.items():
            yield from _limit_problems(name, limit, run.checkpoint_config)
    elif callable(stop) and not isinstance(stop, type):
        yield from _function_problems(stop)
    else:
        yield Problem(
            field=_FIELD,
            what=f"{quoted(stop)} is neither limits nor a function",
            remedy=f"Give limits, for example {_EXAMPLE}, or a function of a report",
        )


def _limit_problems(name: Any, limit: Any, checkpoints: Any) -> Iterator[Problem]:
    field = f"{_FIELD}[{name!r}]"
    if not isinstance(name, str) or not name:
        yield Problem(
            field=field,
            what="it is not the name of a metric",
            remedy=f"Give names and limits, for example {_EXAMPLE}",
        )
        return
    if name == STEP:
        if not is_whole(limit) or limit < 1:
            yield Problem(
                field=field,
                what=f"{quoted(limit)} is not a number of steps",
                remedy="Give a whole number, 1 or more",
            )
        return
    if name in _TIMES:
        yield Problem(
            field=field,
            what="no report has the time of training",
            remedy="Use RunConfig(time_budget_s=…)",
        )
        return
    ranks = checkpoints if isinstance(checkpoints, CheckpointConfig) else CheckpointConfig()
    try:
        meant = limit_of(name, limit, ranks)
    except ValueError as error:
        yield Problem(
            field=field,
            what=str(error),
            remedy='Give a finite number, or a text such as "<= 0.1" or ">= 0.9"',
        )
        return
    if not isinstance(limit, str) and meant.comparison == ">=" and is_good_when_small(name):
        yield Problem(
            field=field,
            what=f"{limit!r} alone is the value to reach, and {name!r} has none: by its name it "
            'becomes smaller, and by CheckpointConfig(checkpoint_score_order="max") larger',
            remedy=f'Use checkpoint_score_order="min", or write "<= {limit}" or ">= {limit}"',
        )


def _function_problems(function: Any) -> Iterator[Problem]:
    if not accepts(function, None):
        yield Problem(
            field=_FIELD,
            what=f"{written(function)} is called with one argument, the report",
            remedy="Let it take one argument, a polytrain_plugins.Report: report.step, "
            "report.metrics",
        )
    yield from deferred_problems(_FIELD, function, effect="and decides nothing")
    yield from pickle_problems(
        _FIELD, function, remedy="Create such objects inside the function, or decide by the report"
    )
