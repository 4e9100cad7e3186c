"""Checks of a backend with its options and devices, and of the training function for it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.config.configs import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from polytrain.config.constraints import Config
from polytrain.config.loop_config import call_problems, config_problems
from polytrain.config.run_spec import RunSpec
from polytrain.functions.function_checks import (
    deferred_problems,
    pickle_problems,
    reference_problems,
)
from polytrain.text.described import is_whole
from polytrain_plugins import (
    Backend,
    Device,
    InvalidJobError,
    Job,
    Problem,
    RegistryError,
    backend_names,
    load_backend,
)
from polytrain_plugins.close_names import ALMOST_THE_SAME, SIMILAR, did_you_mean
from polytrain_plugins.installed import install_command
from polytrain_plugins.returned import problems_of
from polytrain_plugins.type_names import quoted


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raise all problems together, if there are any.

    Raises:
        InvalidJobError: there are.
    """
    found = tuple(problems)
    if found:
        raise InvalidJobError(found)


def unknown_options(
    cls: type[Backend], options: Mapping[str, Any], others: Iterable[str], *, has_function: bool
) -> Iterator[Problem]:
    """Options that the backend doesn't have.

    Args:
        others: names that may have been meant, besides the backend's options.
        has_function: whether there is a training function, whose config may have been meant.
    """
    known = _option_fields(cls)
    for name in [name for name in options if name not in known]:
        call = _call_with(name)
        if call is None:
            # A setting of the training function may have any name.
            similar = ALMOST_THE_SAME if has_function else SIMILAR
            call = did_you_mean(name, [*known, *others], cutoff=similar)
            if has_function and not call:
                call = f"For the training function, pass train_loop_config={{{name!r}: …}}. "
            elif not call and (other := _backend_with(name)) is not None:
                call = f"The {other} backend has it: make_trainer({other!r}, {name}=…). "
            call += f"It has: {', '.join(known) or 'none'}"
        what = f"the {cls.name} backend has no such option"
        yield Problem(field=name, what=what, remedy=call)


_CALLS: Mapping[str, type[Config]] = {
    "scaling_config=ScalingConfig({}=…)": ScalingConfig,
    "run_config=RunConfig({}=…)": RunConfig,
    "run_config=RunConfig(failure_config=FailureConfig({}=…))": FailureConfig,
    "run_config=RunConfig(checkpoint_config=CheckpointConfig({}=…))": CheckpointConfig,
    "dataset_config=DataConfig({}=…)": DataConfig,
}
"""How a field of a configuration is passed."""

_NAMES_ELSEWHERE = {
    "config": "train_loop_config",
    "data": "datasets",
    "dataset": "datasets",
    "resume_from_checkpoint": "restore_from",
}
"""What an option is called in other libraries → its name here."""


def _call_with(name: str) -> str | None:
    """Return how to pass what the user has named, if it is no option of a backend."""
    if name in _NAMES_ELSEWHERE:
        return f"Pass {_NAMES_ELSEWHERE[name]}=…"
    found = (call for call, cls in _CALLS.items() if any(each.name == name for each in fields(cls)))  # type: ignore[arg-type]  # every configuration is a dataclass
    call = next(found, None)
    return None if call is None else f"Pass {call.format(name)}"


def _backend_with(option: str) -> str | None:
    """The name of an installed backend that has an option, if it is only one."""
    found = [cls.name for cls in loaded_backends(backend_names()) if option in _option_fields(cls)]
    return found[0] if len(found) == 1 else None


def loaded_backends(names: Iterable[str]) -> Iterator[type[Backend]]:
    """Yield the installed backends of these names, without those that can't be loaded."""
    for name in names:
        with contextlib.suppress(RegistryError):
            yield load_backend(name)


def missing_options(cls: type[Backend], options: Mapping[str, Any]) -> Iterator[Problem]:
    """Options without a default that the user hasn't passed."""
    for name, option in _option_fields(cls).items():
        required = option.default is MISSING and option.default_factory is MISSING
        if required and name not in options:
            yield Problem(field=name, what="it is required", remedy=f"Pass {name}=…")


def made_backend(given: Any) -> Backend | None:
    """Return the backend that the user has passed, by itself or by its name.

    Raises:
        RegistryError: no backend of this name can be loaded.
        InvalidJobError: it is something else, or needs more than its name.
    """
    if given is None or isinstance(given, Backend):
        return given
    if isinstance(given, str):
        cls = load_backend(given)
        needed = [problem.field for problem in missing_options(cls, {})]
        if not needed:
            return cls()
        what = f"{given!r} needs {', '.join(needed)}"
        options = ", ".join(f"{name}=…" for name in needed)
        remedy = f"Pass the backend itself: {cls.__name__}({options})"
    else:
        what = f"{quoted(given)} is no backend"
        remedy = 'Give the name of one, such as "xgboost", or the backend itself'
    raise InvalidJobError((Problem(field="backend", what=what, remedy=remedy),))


def _option_fields(cls: type[Backend]) -> dict[str, Field[Any]]:
    return {option.name: option for option in fields(cls) if option.init}  # type: ignore[arg-type]  # every backend is a dataclass


def function_problems(spec: RunSpec) -> Iterator[Problem]:
    """What is wrong with the training function, or with its absence."""
    # What a user passes may be anything, whatever the annotation says.
    function: Any = spec.train_loop_per_worker
    config: Any = spec.train_loop_config
    if function is None:
        yield from _absence_problems(spec.backend, config)
        return
    if not callable(function):
        takes_script = isinstance(function, str) and "script" in _option_fields(type(spec.backend))
        yield Problem(
            field="train_loop_per_worker",
            what=f"{quoted(function)} is not callable",
            remedy=f"Pass the function itself{', or script=…' if takes_script else ''}",
        )
        return
    yield from config_problems(config)
    yield from call_problems(function, config)
    yield from deferred_problems("train_loop_per_worker", function, effect="and trains nothing")
    yield from pickle_problems("train_loop_per_worker", function)
    yield from pickle_problems("train_loop_config", config)


def _absence_problems(backend: Backend, config: Any) -> Iterator[Problem]:
    if not backend.capabilities.declarative and backend.program(max_failures=0) is None:
        yield Problem(
            field="train_loop_per_worker",
            what=f"there is none, and the {backend.name} backend trains only what a training "
            "function says",
            remedy=f"Pass one: make_trainer({backend.name!r}, train_func)",
        )
    if config is not None:
        yield Problem(
            field="train_loop_config",
            what="there is no training function to pass it to",
            remedy="Pass train_loop_per_worker too, or leave it out",
        )


def ray_data_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem if a training function that can be pickled names data in Ray's memory."""
    for field in ("train_loop_per_worker", "train_loop_config"):
        yield from reference_problems(
            field,
            getattr(spec, field),
            process="a worker process",
            remedy="Pass a data set as datasets={…}, and get_dataset_shard(name) has its rows",
        )


def frequency_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem if checkpoints are requested of polytrain that only the function can make."""
    checkpoints = spec.run_config.checkpoint_config
    frequency = getattr(checkpoints, "checkpoint_frequency", 0)
    if _has_function(spec) and is_whole(frequency) and frequency > 0:
        yield Problem(
            field="CheckpointConfig.checkpoint_frequency",
            what="a training function makes its checkpoints itself",
            remedy="Leave it out, and call polytrain.report(metrics, checkpoint=…) in the function "
            "as often as you want one",
        )


def unsaved_end_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem if a condition would finish a run without a checkpoint.

    If every rank writes a part of it, one can't be made at the step at which rank 0 meets it.
    """
    config = spec.run_config
    given = {"stop": config.stop, "time_budget_s": config.time_budget_s}
    conditions = [name for name, value in given.items() if value not in (None, {})]
    if conditions and not _has_function(spec) and not spec.saves_by_itself:
        yield Problem(
            field="CheckpointConfig.checkpoint_frequency",
            what=f"it is 0, and RunConfig.{conditions[0]} may finish the run: where every rank "
            "writes a part of a checkpoint, there would be none",
            remedy="Give a number of steps, such as checkpoint_frequency=10",
        )


def _has_function(spec: RunSpec) -> bool:
    """Whether there is a training function, or a program of the backend's."""
    backend: Backend | None = spec.backend
    return spec.train_loop_per_worker is not None or (
        backend is not None and backend.program(max_failures=0) is not None
    )


def backend_problems(backend: Backend, job: Job) -> Iterator[Problem]:
    """The backend's own problems, and whether its framework and devices are available."""
    yield from installation_problems(backend)
    problems = problems_of(backend, job)
    field = "ScalingConfig.use_gpu"
    if (
        job.use_gpu
        and Device.GPU not in backend.capabilities.devices
        # A backend that reports it itself gives a better reason.
        and not any(problem.field == field for problem in problems)
    ):
        yield Problem(
            field=field,
            what=f"the {backend.name} backend can't train on a GPU",
            remedy="Use use_gpu=False",
        )
    yield from problems


def unused_gpu_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem if workers get GPUs that the backend would use, and isn't to use.

    A training function may use GPUs by itself with a backend that doesn't declare them.
    """
    scaling = spec.scaling_config
    amount = scaling.resources.get("GPU", 0)
    if amount and not scaling.use_gpu and Device.GPU in spec.backend.capabilities.devices:
        yield Problem(
            field="ScalingConfig.use_gpu",
            what=f"it is False, and resources_per_worker gives a worker {amount:g} GPU",
            remedy="Use use_gpu=True, or leave 'GPU' out of resources_per_worker",
        )


def virtual_worker_problems(spec: RunSpec) -> Iterator[Problem]:
    """Yield a problem if the backend can't train with virtual workers; it names those that can."""
    if spec.scaling_config.virtual_workers is None or spec.backend.capabilities.virtual_workers:
        return
    loaded = loaded_backends(backend_names())
    able = [each.name for each in loaded if each.capabilities.virtual_workers]
    if spec.backend.capabilities.exact_scaling:
        remedy = "Leave it out: this backend saves the same model at any number of workers"
    else:
        remedy = f"Leave it out, or use a backend that has them: {', '.join(able) or 'torch'}"
    yield Problem(
        field="ScalingConfig.virtual_workers",
        what=f"the {spec.backend.name} backend has no virtual workers",
        remedy=remedy,
    )


def changed_virtual_workers(start: StartingPoint, now: int | None) -> Iterator[Problem]:
    """Yield a problem if training can't continue from there with this number of virtual workers.

    What had none may have some from there on, and a run of its own may have none.

    Args:
        now: how many the run is to have; None for none.
    """
    then = start.virtual_workers
    if then is None or now == then or (now is None and not start.own):
        return
    trained = "the run was trained" if start.own else "the checkpoint of restore_from was made"
    other = "train under another name" if start.own else "leave it out"
    yield Problem(
        field="ScalingConfig.virtual_workers",
        what=f"{trained} with {then} until step {start.step}, now it is {now}: it wouldn't "
        "continue with the same bits",
        remedy=f"Give virtual_workers={then}, or {other}",
    )


def installation_problems(backend: Backend) -> Iterator[Problem]:
    """Yield the modules that a backend needs and that can't be found."""
    for module, command in missing_modules(backend.requires).items():
        yield Problem(
            field="backend",
            what=f"the {backend.name} backend needs {module}, which is not installed",
            remedy=f"Install it with: {install_command(command)}",
        )
    program = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    name = Path(program).stem
    if name in backend.requires and _is_file_of(name, program):
        yield Problem(
            field="backend",
            what=f"the {backend.name} backend needs {name}, and would import {program} instead, "
            "which has its name",
            remedy="Rename that file",
        )


def missing_modules(required: Mapping[str, str]) -> dict[str, str]:
    """Return those of `Backend.requires` that can't be found."""
    return {module: command for module, command in required.items() if _is_missing(module)}


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # of a module in a package, the package
        return True


def _is_file_of(module: str, file: str) -> bool:
    """Return whether an import of a module runs this file."""
    spec = PathFinder.find_spec(module)
    return spec is not None and os.path.realpath(spec.origin or "") == os.path.realpath(file)
