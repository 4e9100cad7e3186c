"""How checkpoints are validated beside training. The names and defaults are Ray Train's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from polytrain.config.constraints import (
    Config,
    Entries,
    Function,
    Seconds,
    Wrong,
    field_problems,
)
from polytrain.config.ray_arguments import VALIDATION, VALIDATION_TASK, takes_ray_arguments
from polytrain.text.described import plain
from polytrain.text.secret_names import is_secret
from polytrain_plugins.type_names import quoted

if TYPE_CHECKING:
    from polytrain.checkpoint.checkpoint import Checkpoint


class ValidationFn(Protocol):
    """A function that validates a checkpoint."""

    def __call__(self, checkpoint: Checkpoint, **kwargs: Any) -> Mapping[str, Any]:
        """Return the metrics of a committed checkpoint."""


def json_arguments(arguments: Mapping[Any, Any]) -> Iterator[Wrong]:
    """Yield the arguments that can't be written down by name, in JSON."""
    for name, value in arguments.items():
        if not isinstance(name, str) or not _is_json(value):
            yield (
                f"{name!r}: {quoted(value)} can't be written down in JSON, for a run that is "
                "resumed",
                "Pass numbers, texts, lists or dicts of them by name; make anything else "
                "in the validation function",
            )


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value) or value != value
    except (TypeError, ValueError):
        return False


def task_options(options: Mapping[Any, Any]) -> Iterator[Wrong]:
    """Yield what `ray.remote` of a validation can't be given."""
    for name in options:
        if not isinstance(name, str):
            yield f"{name!r} is not the name of an option", "Give options of ray.remote by name"
    if "num_returns" in options:
        yield (
            "a validation returns its metrics alone, so num_returns can't be chosen",
            "Leave num_returns out",
        )


@takes_ray_arguments(**VALIDATION_TASK)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ValidationTaskConfig(Config):
    """How one checkpoint is validated."""

    fn_kwargs: Annotated[Mapping[str, Any], Entries(json_arguments)] = field(default_factory=dict)
    """Passed to the function besides the checkpoint: values that JSON can hold."""

    timeout_s: Annotated[float | None, Seconds(above=True, or_none="for no limit")] = None
    """Seconds after which the validation is killed and has failed; None is no limit."""


@takes_ray_arguments(**VALIDATION)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ValidationConfig(Config):
    """How checkpoints are validated in a process of their own, while training continues.

    With a training function, checkpoints that are reported with `report(…, validation=…)` are
    validated, otherwise all. They are validated one at a time, in the order of their commits.
    """

    fn: Annotated[
        Callable[..., Mapping[str, Any]],
        Function(
            "Pass the function itself: it takes a checkpoint, and returns a dict of metrics",
        ),
    ]
    """A `ValidationFn`, called as `fn(checkpoint, **fn_kwargs)`. Returns a dict of metrics,
    which are added to those of the checkpoint, and to the history at its step."""

    task_config: ValidationTaskConfig = field(default_factory=ValidationTaskConfig)
    """The default for each validation."""

    ray_remote_kwargs: Annotated[Mapping[str, Any], Entries(task_options)] = field(
        default_factory=dict
    )
    """Options of `ray.remote` for the validation, such as `{"num_gpus": 1}`; one CPU by default.
    Without Ray, `num_cpus` is the number of threads; by default as many as a worker has."""

    on_failure: Literal["warn", "fail"] = "warn"
    """What happens after a validation that raises, is killed, takes too long or returns no dict of
    new metrics. "warn": it is logged, and the checkpoint keeps the metrics that it has. "fail": it
    ends the run, and the next `fit()` validates the checkpoint again."""


_WITHOUT_RAY = ("num_cpus", "max_retries", "retry_exceptions")
"""Options that don't ask for a cluster. Without Ray a lost validation isn't tried again."""


def options_of_ray(config: ValidationConfig) -> tuple[str, ...]:
    """Return the names of the options that mean nothing without Ray."""
    return tuple(
        name
        for name, value in config.ray_remote_kwargs.items()
        if value and name not in _WITHOUT_RAY
    )


def task_of(config: ValidationConfig, task: Mapping[str, Any]) -> ValidationTaskConfig:
    """Return how to validate a checkpoint.

    Args:
        task: as `validation_of_report` returns it. It adds to the default arguments, and replaces
            the default time limit.
    """
    default = config.task_config
    if not task:
        return default
    return ValidationTaskConfig(
        fn_kwargs={**default.fn_kwargs, **task["fn_kwargs"]}, timeout_s=task["timeout_s"]
    )


def validation_of_report(
    validation: Any, *, has_checkpoint: bool, validates: bool
) -> Mapping[str, Any] | None:
    """Return how a report wants its checkpoint to be validated, in plain values.

    Returns:
        Empty for the default; None for no validation.

    Raises:
        TypeError: it is neither a truth value nor a `ValidationTaskConfig`.
        ValueError: it can't be carried out.
    """
    validation = plain(validation)
    if validation is False or validation is None:
        return None
    if not (validation is True or isinstance(validation, ValidationTaskConfig)):
        raise TypeError(
            f"report(validation=…) takes True, False or a ValidationTaskConfig, not a "
            f"{type(validation).__name__}."
        )
    if not validates:
        raise ValueError(
            "report(validation=…) needs a function that validates: pass "
            "validation_config=ValidationConfig(fn) to the trainer."
        )
    if not has_checkpoint:
        raise ValueError(
            "report(validation=…) was called without a checkpoint, which is what is validated: "
            "pass checkpoint=Checkpoint.from_directory(path), or leave validation out."
        )
    if not isinstance(validation, ValidationTaskConfig):
        return {}
    problems = [str(each) for each in field_problems(validation, "validation")]
    if problems:
        raise ValueError(f"report(validation=…): {'; '.join(problems)}")
    for name, value in validation.fn_kwargs.items():
        if is_secret(name) and isinstance(value, str):
            raise ValueError(
                f"report(validation=…): the journal keeps the arguments of a report, and {name!r} "
                "is a secret by its name. Pass it in ValidationConfig(task_config=…), whose "
                "arguments aren't kept, or in the environment."
            )
    return {"fn_kwargs": dict(validation.fn_kwargs), "timeout_s": validation.timeout_s}
