"""A job as TOML: its keys are the arguments of `make_trainer`. Nothing is imported to read it."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from polytrain.config.configs import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from polytrain.config.constraints import working_directory
from polytrain.config.validation_config import ValidationConfig, ValidationTaskConfig
from polytrain.functions.users_code import users_traceback
from polytrain.view.cli.found import Refused
from polytrain_plugins import PolytrainError
from polytrain_plugins.close_names import close_to, did_you_mean

IMPORT = "import"
"""Key of a table that stands for an object: `{import = "module:name"}`."""

_SHOWN = 60
"""Characters of a value in an error."""

_CONFIGS: Mapping[str, type[Any]] = {
    "scaling_config": ScalingConfig,
    "run_config": RunConfig,
    "failure_config": FailureConfig,
    "checkpoint_config": CheckpointConfig,
    "validation_config": ValidationConfig,
    "task_config": ValidationTaskConfig,
}


class JobFileError(Refused):
    """A job file, or a value to set in it, is wrong."""


def job_of(text: str, settings: Iterable[str] = ()) -> dict[str, Any]:
    """Return the job of a TOML text, changed by settings `a.b=value`.

    Args:
        text: the file's content.
        settings: each a key, `=` and a value of TOML; what isn't TOML is a string.

    Raises:
        JobFileError: the text isn't TOML, or a setting has no `=` or leads into a value.
    """
    try:
        job = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobFileError(f"it isn't TOML: {error}") from error
    for setting in settings:
        _set(job, setting)
    return job


def arguments_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `make_trainer` for a job.

    Raises:
        JobFileError: a key isn't known, or an object can't be imported.
    """
    arguments = {name: _made(name, value) for name, value in job.items()}
    if "backend" not in arguments:
        near = close_to("backend", job)
        meant = f". Is {near[0]!r} meant for it?" if near else ', for example backend = "xgboost"'
        raise JobFileError(f'the key "backend" is missing{meant}')
    function = arguments.get("train_loop_per_worker")
    if isinstance(function, str):
        arguments["train_loop_per_worker"] = imported(function)
    return arguments


def imported(path: Any) -> Any:
    """Return the object that `module:name` names.

    Raises:
        JobFileError: there is none.
        PolytrainError: the module makes a job that is wrong, or runs one.
    """
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise JobFileError(f"{str(path)[:_SHOWN]!r} names no object: give module:name")
    if module.endswith(".py"):
        # Python would import the file, as a package, before it finds no module `py` in it.
        meant = f"{module.removesuffix('.py')}:{name}"
        raise JobFileError(f"{path!r} names a file: give its module, {meant}")
    try:
        found: Any = import_module(module)
    except PolytrainError:
        raise
    except Exception as error:  # whatever the module raises while it is imported
        if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(
            f"{error.name}."
        ):
            raise JobFileError(f"{module} can't be imported.\n{users_traceback(error)}") from error
        beside = [file.stem for file in Path().glob("*.py")]
        meant = did_you_mean(module, beside) or "Modules in the working directory are found, too"
        raise JobFileError(f"{path!r}: {error}. {meant}".strip()) from error
    for part in name.split("."):
        if not hasattr(found, part):
            meant = did_you_mean(part, [each for each in dir(found) if each[0] != "_"])
            raise JobFileError(f"{path!r}: {module} has no {name}. {meant}".strip())
        found = getattr(found, part)
    return found


@contextmanager
def modules_beside_you() -> Iterator[None]:
    """Find modules in the working directory, as `python -m` does, also in worker processes."""
    for what, remedy in working_directory():
        raise Refused(f"{what}. {remedy}")
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path[:] = before


def _set(job: dict[str, Any], setting: str) -> None:
    # The value may be a secret.
    key, equals, text = setting.partition("=")
    if not key:
        raise JobFileError("--set has a value without a key. Give --set KEY=VALUE")
    if not equals:
        raise JobFileError(f"--set {key} has no value. Give --set {key}=VALUE")
    *path, last = key.strip().split(".")
    table = job
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise JobFileError(f"--set {key}: {part} is a value, not a table")
    try:
        table[last] = tomllib.loads(f"value = {text}")["value"]
    except RecursionError as error:
        raise JobFileError(f"--set {key}: the value is nested too deeply") from error
    except ValueError:
        table[last] = text


def _made(name: str, value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {IMPORT}:
        return imported(value[IMPORT])
    if name in _CONFIGS and isinstance(value, dict):
        return _config(name, _CONFIGS[name], value)
    if name == "dataset_config" and isinstance(value, dict):
        is_of_all = value.keys() <= {field.name for field in fields(DataConfig)}
        if is_of_all or not all(isinstance(own, dict) for own in value.values()):
            return _config(name, DataConfig, value)
        return {each: _config(f"{name}.{each}", DataConfig, own) for each, own in value.items()}
    if isinstance(value, dict):
        return {key: _made("", each) for key, each in value.items()}
    return [_made("", each) for each in value] if isinstance(value, list) else value


def _config(name: str, cls: type[Any], table: Mapping[str, Any]) -> Any:
    assert is_dataclass(cls)
    known = get_type_hints(cls)
    unknown = table.keys() - known.keys()
    if unknown:
        meant = did_you_mean(min(unknown), known)
        raise JobFileError(
            f"{name} has no {', '.join(sorted(unknown))}. {meant}There are: "
            f"{', '.join(sorted(known))}"
        )
    values = {key: _made(key, value) for key, value in table.items()}
    # TOML has no tuples: num_workers = [2, 8].
    try:
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
    except TypeError as error:
        raise JobFileError(f"{name}: {error}") from error
