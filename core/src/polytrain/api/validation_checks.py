"""What is wrong with a `ValidationConfig`, found before any worker starts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polytrain.config.constraints import field_problems, wrong_type
from polytrain.config.loop_config import written
from polytrain.config.run_spec import RunSpec
from polytrain.config.validation_config import (
    ValidationConfig,
    ValidationTaskConfig,
    options_of_ray,
)
from polytrain.functions.function_checks import (
    deferred_problems,
    pickle_problems,
    reference_problems,
)
from polytrain.storage.location import Location, is_of_one_process
from polytrain.text.described import resource_amount
from polytrain_plugins import Problem

_FN = "ValidationConfig.fn"
_OPTIONS = "ValidationConfig.ray_remote_kwargs"


def validation_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield what is wrong with what a user passed as `validation_config`."""
    # It may be anything, whatever the annotation says.
    config: Any = spec.validation_config
    if not isinstance(config, ValidationConfig):
        yield wrong_type("validation_config", config, ValidationConfig)
        return
    wrong = tuple(field_problems(config, "ValidationConfig"))
    yield from wrong
    is_task_right = not any("task_config" in problem.field for problem in wrong)
    if callable(config.fn):
        yield from _function_problems(
            config.fn,
            config.task_config if is_task_right else ValidationTaskConfig(),
            # `report(validation=…)` of a training function may give further arguments.
            may_get_more=spec.train_loop_per_worker is not None,
        )


def _function_problems(
    function: Callable[..., Any], task: ValidationTaskConfig, *, may_get_more: bool
) -> Iterator[Problem]:
    names = "".join(f", {name}=…" for name in task.fn_kwargs)
    try:
        signature = inspect.signature(function)
        bind = signature.bind_partial if may_get_more else signature.bind
        bind(None, **dict.fromkeys(task.fn_kwargs))
    except TypeError as error:
        yield Problem(
            field=_FN,
            what=f"{written(function)} is called with (checkpoint{names}): {error}",
            remedy="Let its first argument be the checkpoint, the others those of "
            "ValidationTaskConfig.fn_kwargs",
        )
    except ValueError:  # some callables in C have no signature
        pass
    yield from deferred_problems(_FN, function, effect="and validates nothing")
    yield from pickle_problems(_FN, function)


def memory_problems(config: ValidationConfig | None, location: Location) -> Iterator[Problem]:
    """Yield why the process of a validation can't reach a run that has no worker processes."""
    if config is not None and is_of_one_process(location.address, location.filesystem):
        yield Problem(
            field="validation_config",
            what=f"a validation has a process of its own, which can't reach {location.address!r}, "
            "the memory of this one",
            remedy="Give RunConfig(storage_path=…) a directory or an address",
        )


def inline_problems(config: ValidationConfig | None) -> Iterator[Problem]:
    """Yield why checkpoints can't be validated beside a run in the driver's own process."""
    if config is None:
        return
    options = options_of_ray(config)
    if options:
        yield Problem(
            field=_OPTIONS,
            what=f"{', '.join(options)}: num_workers=0 doesn't use Ray, and gives a validation "
            "CPUs only",
            remedy="Leave it out, or use num_workers=1",
        )
    yield from without_ray_problems(config)
    if not sys.platform.startswith("linux"):
        yield Problem(
            field="validation_config",
            what=f"the processes that validate need Linux, this is {sys.platform}",
            remedy="Leave it out here",
        )


def without_ray_problems(config: ValidationConfig) -> Iterator[Problem]:
    """Yield why the function can't be called without Ray: it names data in Ray's memory."""
    yield from reference_problems(
        _FN,
        config.fn,
        process="a validation of this run",
        remedy="Leave cluster='local' or num_workers=0 out to use Ray, or make the data in "
        "the validation function",
    )


def ray_problems(
    config: ValidationConfig | None, nodes: Sequence[Mapping[str, float]] | None
) -> Iterator[Problem]:
    """Yield why Ray, which is initialised, can't carry a validation out.

    Args:
        nodes: each node's total resources; of a cluster that grows, those of all at its largest,
            or None if its largest size is unknown.
    """
    if config is None:
        return
    import ray

    options = dict(config.ray_remote_kwargs)
    try:
        ray.remote(_nothing).options(**options)
    except (TypeError, ValueError) as error:
        yield Problem(
            field=_OPTIONS,
            what=f"Ray refuses it: {error}",
            remedy="Give options of ray.remote for tasks, such as num_cpus and num_gpus",
        )
        return
    if nodes is None:
        return
    wanted = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0)}
    wanted |= options.get("resources") or {}
    needed = {name: amount for name, amount in wanted.items() if amount}
    if not any(all(node.get(n, 0) >= amount for n, amount in needed.items()) for node in nodes):
        one = " and ".join(resource_amount(*each) for each in needed.items())
        yield Problem(
            field=_OPTIONS,
            what=f"a validation takes {one}, and no node of the cluster has that",
            remedy="Ask for less",
        )


def _nothing() -> None: ...
