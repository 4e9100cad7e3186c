"""What is wrong with a run's configuration by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from polytrain.common.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain_plugins import Problem

_LEAST_WINDOW_S = 0.1
"""The kernel counts in ticks, of up to ten milliseconds."""


def config_problems(scaling: Any, run: Any) -> Iterator[Problem]:
    """What is wrong with the configuration by itself."""
    if not isinstance(scaling, ScalingConfig):
        yield wrong_type("scaling_config", scaling, ScalingConfig)
    else:
        yield from _scaling_problems(scaling)
    if not isinstance(run, RunConfig):
        yield wrong_type("run_config", run, RunConfig)
    else:
        yield from _run_problems(run)
    if isinstance(scaling, ScalingConfig) and isinstance(run, RunConfig):
        yield from _straggler_problems(scaling, run.failure_config)


def _scaling_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    # What a user passes may be anything, whatever the annotation says.
    count: Any = scaling.num_workers
    yield from _number_problems(count)
    yield from _resource_problems(scaling)
    yield from _choice_problems(scaling, "placement_strategy")
    yield from _choice_problems(scaling, "cluster")
    yield from _count_problems(scaling, "standby", "agents", remedy="Give 0 or more")
    yield from _seconds_problems(scaling, "start_timeout_s")
    if count == 0 and scaling.use_gpu:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what="num_workers=0 trains in this process, which has been given no GPU",
            remedy="Use num_workers=1",
        )
    if count == 0 and scaling.standby:
        yield Problem(
            field="ScalingConfig.standby",
            what="num_workers=0 trains in this process, which nothing can take the place of",
            remedy="Use num_workers=1",
        )
    if isinstance(count, tuple) and scaling.placement_strategy.startswith("STRICT_"):
        yield Problem(
            field="ScalingConfig.placement_strategy",
            what=f"{scaling.placement_strategy} can't be kept while num_workers={count} changes",
            remedy=f"Use {scaling.placement_strategy.removeprefix('STRICT_')!r}",
        )
    if count != 0 and not sys.platform.startswith("linux"):
        yield Problem(
            field="ScalingConfig.num_workers",
            what=f"worker processes need Linux, this is {sys.platform}",
            remedy="Use num_workers=0 here",
        )


def _number_problems(count: Any) -> Iterator[Problem]:
    field = "ScalingConfig.num_workers"
    if isinstance(count, tuple | list):
        least, most = count if len(count) == 2 else (0, 0)
        if (
            isinstance(count, list)
            or not (is_count(least) and is_count(most))
            or not 1 <= least <= most
        ):
            yield Problem(
                field=field,
                what=f"{count!r} are not the least and the most workers",
                remedy="Give two numbers, the smaller first, for example (2, 8)",
            )
    elif not is_count(count) or count < 0:
        yield Problem(
            field=field,
            what=f"{count!r} is not a number of workers",
            remedy="Give a whole number: 1 or more, or 0 to train in this process; or the least "
            "and the most, for example (2, 8)",
        )


def _resource_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    field = "ScalingConfig.resources_per_worker"
    resources: Any = scaling.resources_per_worker
    if resources is None:
        return
    if not isinstance(resources, Mapping):
        yield wrong_type(field, resources, dict)
        return
    wrong = {k: v for k, v in resources.items() if not isinstance(v, int | float) or v < 0}
    for name, amount in wrong.items():
        yield Problem(
            field=field,
            what=f"{name!r}: {amount!r} is not an amount",
            remedy='Give numbers, for example {"CPU": 2}',
        )
    if not wrong and not any(scaling.resources.values()):
        yield Problem(
            field=field,
            what=f"{dict(resources)} gives a worker nothing",
            remedy='Give it something, for example {"CPU": 1}',
        )


def _run_problems(run: RunConfig) -> Iterator[Problem]:
    name: Any = run.name
    if name is not None and not (isinstance(name, str) and name and name == Path(name).name):
        yield Problem(
            field="RunConfig.name",
            what=f"{name!r} can't name a directory",
            remedy="Give a name without slashes",
        )
    storage: Any = run.storage_path
    if not isinstance(storage, str | Path | None):
        yield wrong_type("RunConfig.storage_path", storage, str)
    yield from _seconds_problems(run, "storage_timeout_s")
    yield from _choice_problems(run, "if_finished")
    failure: Any = run.failure_config
    if not isinstance(failure, FailureConfig):
        yield wrong_type("RunConfig.failure_config", failure, FailureConfig)
    else:
        yield from _failure_problems(failure)
    checkpoint: Any = run.checkpoint_config
    if not isinstance(checkpoint, CheckpointConfig):
        yield wrong_type("RunConfig.checkpoint_config", checkpoint, CheckpointConfig)
    else:
        yield from _checkpoint_problems(checkpoint)


def _failure_problems(config: FailureConfig) -> Iterator[Problem]:
    yield from _count_problems(
        config,
        "max_failures",
        "failures",
        least=-1,
        remedy="Give 0 or more, or -1 for any number",
    )
    if config.retry_user_errors not in (True, False, "unless_repeated"):
        yield Problem(
            field="FailureConfig.retry_user_errors",
            what=f"{config.retry_user_errors!r} is unknown",
            remedy="Give True, False or 'unless_repeated'",
        )
    for name in ("hang_action", "stragglers"):
        yield from _choice_problems(config, name)
    for name in ("rendezvous_timeout_s", "node_cooldown_s"):
        yield from _seconds_problems(config, name)
    window = config.straggler_window_s
    if not is_seconds(window) or window < _LEAST_WINDOW_S:
        yield Problem(
            field="FailureConfig.straggler_window_s",
            what=f"{window!r} is no time that can be measured",
            remedy=f"Give a number of seconds, {_LEAST_WINDOW_S:g} or more",
        )
    timeout = config.hang_timeout_s
    if timeout is not None and not (is_seconds(timeout) and timeout > 0):
        yield Problem(
            field="FailureConfig.hang_timeout_s",
            what=f"{timeout!r} is no time",
            remedy="Give a number of seconds above 0, or None to let ranks take any time",
        )


def _straggler_problems(scaling: ScalingConfig, failure: Any) -> Iterator[Problem]:
    replaces = isinstance(failure, FailureConfig) and failure.stragglers == "replace"
    if replaces and scaling.standby == 0:
        yield Problem(
            field="FailureConfig.stragglers",
            what="'replace' gives a straggler's place to a standby, and there is none",
            remedy="Set ScalingConfig(standby=1), or use 'report'",
        )


def _checkpoint_problems(config: CheckpointConfig) -> Iterator[Problem]:
    if config.num_to_keep is not None:
        remedy = "Give 1 or more, or None to keep all"
        yield from _count_problems(config, "num_to_keep", "checkpoints", least=1, remedy=remedy)
    remedy = "Give 1 or more, or 0 to save at the end only"
    yield from _count_problems(config, "checkpoint_frequency", "rounds", remedy=remedy)
    for name in ("checkpoint_score_order", "written_by", "upload"):
        yield from _choice_problems(config, name)
    remedy = "Give 1 or more"
    yield from _count_problems(config, "max_in_flight", "checkpoints", least=1, remedy=remedy)
    yield from _seconds_problems(config, "report_timeout_s")


def _choice_problems(config: Any, name: str) -> Iterator[Problem]:
    """A field that takes one of a few words has another value."""
    value = getattr(config, name)
    allowed = get_args(get_type_hints(type(config))[name])
    # Of an optional one, the choice is nested.
    choices = [c for choice in allowed for c in (get_args(choice) or (choice,))]
    words = [c for c in choices if c is not type(None)]
    if value not in words and not (value is None and type(None) in choices):
        yield Problem(
            field=f"{type(config).__name__}.{name}",
            what=f"{value!r} is unknown",
            remedy=f"Give {' or '.join(map(repr, words))}",
        )


def _count_problems(
    config: Any, name: str, things: str, *, least: int = 0, remedy: str
) -> Iterator[Problem]:
    """A field that takes a number of things has another value."""
    value = getattr(config, name)
    if not is_count(value) or value < least:
        yield Problem(
            field=f"{type(config).__name__}.{name}",
            what=f"{value!r} is not a number of {things}",
            remedy=remedy,
        )


def _seconds_problems(config: Any, name: str) -> Iterator[Problem]:
    """A field that takes a length of time has another value."""
    value = getattr(config, name)
    if not is_seconds(value):
        yield Problem(
            field=f"{type(config).__name__}.{name}",
            what=f"{value!r} is no time",
            remedy="Give a number of seconds, 0 or more",
        )


def is_count(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_seconds(value: Any) -> bool:
    """Whether it is a length of time."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def wrong_type(field: str, value: Any, wanted: type) -> Problem:
    """A value of another type than its field takes."""
    return Problem(
        field=field,
        what=f"it is a {type(value).__name__}",
        remedy=f"Pass a {wanted.__name__}",
    )
