"""Everything that is wrong with a job, found before any worker starts."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import cloudpickle

from polytrain.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain.policy.scaling import largest_fit
from polytrain_plugins import Backend, Device, Job, Problem


def unknown_options(
    cls: type[Backend], options: Mapping[str, Any], others: Iterable[str]
) -> Iterator[Problem]:
    """Options that the backend doesn't have.

    Args:
        cls: the backend.
        options: what the user passed.
        others: names that may have been meant, besides the backend's options.
    """
    known = _option_fields(cls)
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, [*known, *others], n=1)
            remedy = f"Did you mean {nearest[0]!r}? " if nearest else ""
            yield Problem(
                field=name,
                what=f"the {cls.name} backend has no such option",
                remedy=f"{remedy}It has: {', '.join(known) or 'none'}",
            )


def missing_options(cls: type[Backend], options: Mapping[str, Any]) -> Iterator[Problem]:
    """Options without a default that the user hasn't passed."""
    for name, option in _option_fields(cls).items():
        required = option.default is MISSING and option.default_factory is MISSING
        if required and name not in options:
            yield Problem(field=name, what="it is required", remedy=f"Pass {name}=…")


def _option_fields(cls: type[Backend]) -> dict[str, Field[Any]]:
    return {option.name: option for option in fields(cls) if option.init}  # type: ignore[arg-type]  # every backend is a dataclass


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


def _scaling_problems(scaling: ScalingConfig) -> Iterator[Problem]:
    # What a user passes may be anything, whatever the annotation says.
    count: Any = scaling.num_workers
    if not is_count(count) or count < 0:
        yield Problem(
            field="ScalingConfig.num_workers",
            what=f"{count!r} is not a number of workers",
            remedy="Give a whole number: 1 or more, or 0 to train in this process",
        )
    yield from _resource_problems(scaling)
    strategies = get_args(get_type_hints(ScalingConfig)["placement_strategy"])
    if scaling.placement_strategy not in strategies:
        yield Problem(
            field="ScalingConfig.placement_strategy",
            what=f"{scaling.placement_strategy!r} is unknown",
            remedy=f"Give one of {', '.join(strategies)}",
        )
    if count == 0 and scaling.use_gpu:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what="num_workers=0 trains in this process, which has been given no GPU",
            remedy="Use num_workers=1",
        )
    if is_count(count) and count > 0 and not sys.platform.startswith("linux"):
        yield Problem(
            field="ScalingConfig.num_workers",
            what=f"worker processes need Linux, this is {sys.platform}",
            remedy="Use num_workers=0 here",
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
    if not is_seconds(run.storage_timeout_s):
        yield _no_seconds("RunConfig.storage_timeout_s", run.storage_timeout_s)
    failure: Any = run.failure_config
    if not isinstance(failure, FailureConfig):
        yield wrong_type("RunConfig.failure_config", failure, FailureConfig)
    elif not is_count(failure.max_failures) or failure.max_failures < -1:
        yield Problem(
            field="FailureConfig.max_failures",
            what=f"{failure.max_failures!r} is not a number of failures",
            remedy="Give 0 or more, or -1 for any number",
        )
    checkpoint: Any = run.checkpoint_config
    if not isinstance(checkpoint, CheckpointConfig):
        yield wrong_type("RunConfig.checkpoint_config", checkpoint, CheckpointConfig)
    else:
        yield from _checkpoint_problems(checkpoint)


def _checkpoint_problems(config: CheckpointConfig) -> Iterator[Problem]:
    if config.num_to_keep is not None and not (
        is_count(config.num_to_keep) and config.num_to_keep >= 1
    ):
        yield Problem(
            field="CheckpointConfig.num_to_keep",
            what=f"{config.num_to_keep!r} is not a number of checkpoints",
            remedy="Give 1 or more, or None to keep all",
        )
    if not is_count(config.checkpoint_frequency) or config.checkpoint_frequency < 0:
        yield Problem(
            field="CheckpointConfig.checkpoint_frequency",
            what=f"{config.checkpoint_frequency!r} is not a number of rounds",
            remedy="Give 1 or more, or 0 to save at the end only",
        )
    for name in ("checkpoint_score_order", "written_by", "upload"):
        value = getattr(config, name)
        allowed = get_args(get_type_hints(CheckpointConfig)[name])
        # Of an optional one, the choice is nested.
        choices = [c for choice in allowed for c in (get_args(choice) or (choice,))]
        words = [c for c in choices if c is not type(None)]
        if value not in words and not (value is None and type(None) in choices):
            yield Problem(
                field=f"CheckpointConfig.{name}",
                what=f"{value!r} is unknown",
                remedy=f"Give {' or '.join(map(repr, words))}",
            )
    if not is_count(config.max_in_flight) or config.max_in_flight < 1:
        yield Problem(
            field="CheckpointConfig.max_in_flight",
            what=f"{config.max_in_flight!r} is not a number of checkpoints",
            remedy="Give 1 or more",
        )
    if not is_seconds(config.report_timeout_s):
        yield _no_seconds("CheckpointConfig.report_timeout_s", config.report_timeout_s)


def function_problems(function: Any, config: Any, backend: Backend) -> Iterator[Problem]:
    """What is wrong with the training function, or with its absence."""
    if function is None:
        if not backend.capabilities.declarative:
            yield Problem(
                field="train_loop_per_worker",
                what=f"the {backend.name} backend doesn't declare 'declarative': it can't train "
                "without a training function",
                remedy=f"Pass one: make_trainer({backend.name!r}, train_func)",
            )
        if config is not None:
            yield Problem(
                field="train_loop_config",
                what="there is no training function that could take it",
                remedy="Pass train_loop_per_worker too, or leave it out",
            )
        return
    if not callable(function):
        yield Problem(
            field="train_loop_per_worker",
            what=f"{function!r} is not callable",
            remedy="Pass the function itself",
        )
        return
    if config is not None and not isinstance(config, Mapping):
        yield wrong_type("train_loop_config", config, dict)
    yield from _signature_problems(function, config)
    yield from _pickle_problems("train_loop_per_worker", function)
    yield from _pickle_problems("train_loop_config", config)


def _signature_problems(function: Callable[..., Any], config: Any) -> Iterator[Problem]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables of C don't tell
        return
    arguments: tuple[Any, ...] = () if config is None else ({},)
    try:
        signature.bind(*arguments)
    except TypeError:
        wanted = "no argument" if config is None else "one argument, train_loop_config"
        yield Problem(
            field="train_loop_per_worker",
            what=f"{_name_of(function)}{signature} is called with {wanted}",
            remedy="Pass train_loop_config={…}" if config is None else "Let it take one argument",
        )


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _pickle_problems(field: str, value: Any) -> Iterator[Problem]:
    error = _pickle_error(value)
    if error is None:
        return
    culprits = "; ".join(_culprits(value)) or f"{type(error).__name__}: {error}"
    yield Problem(
        field=field,
        what=f"it can't be sent to the workers: {culprits}",
        remedy="Create such objects inside the training function",
    )


def _pickle_error(value: Any) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # whatever an object's own __reduce__ raises
        return error
    return None


def _culprits(value: Any) -> Iterator[str]:
    """The variables that a function uses, or the entries of a config, that can't be pickled."""
    if isinstance(value, Mapping):
        used = dict(value)
    else:
        found = inspect.getclosurevars(inspect.unwrap(value)) if inspect.isfunction(value) else None
        used = {**found.globals, **found.nonlocals} if found else {}
    for name, content in used.items():
        error = _pickle_error(content)
        if error is not None:
            yield f"{name!r} is a {type(content).__name__} ({error})"


def backend_problems(backend: Backend, job: Job) -> Iterator[Problem]:
    """What the backend itself has to say, and whether its framework and devices are there."""
    for module, command in backend.requires.items():
        if importlib.util.find_spec(module) is None:
            yield Problem(
                field="backend",
                what=f"the {backend.name} backend needs {module}, which is not installed",
                remedy=f"Install it with: {command}",
            )
    if job.use_gpu and Device.GPU not in backend.capabilities.devices:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what=f"the {backend.name} backend doesn't declare the device 'gpu'",
            remedy="Use use_gpu=False",
        )
    yield from backend.problems(job)


def cluster_problems(
    scaling: ScalingConfig, node_totals: list[Mapping[str, float]]
) -> Iterator[Problem]:
    """Whether the cluster could hold the workers if nothing else ran on it."""
    fit = largest_fit(node_totals, scaling.resources)
    if scaling.num_workers > fit.workers:
        yield Problem(
            field="ScalingConfig.num_workers",
            what=f"{scaling.num_workers} is more than the cluster can ever hold: {fit.reason}",
            remedy=f"Use num_workers={fit.workers}" if fit.workers else "Ask for less per worker",
        )


def is_count(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_seconds(value: Any) -> bool:
    """Whether it is a length of time."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _no_seconds(field: str, value: Any) -> Problem:
    return Problem(
        field=field, what=f"{value!r} is no time", remedy="Give a number of seconds, 0 or more"
    )


def wrong_type(field: str, value: Any, wanted: type) -> Problem:
    """A value of another type than its field takes."""
    return Problem(
        field=field,
        what=f"it is a {type(value).__name__}",
        remedy=f"Pass a {wanted.__name__}",
    )
