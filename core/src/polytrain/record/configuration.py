"""What a driver was configured with, for people who look it up or compare two runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from polytrain.config.configs import RunConfig, ScalingConfig
from polytrain.record.secrecy import shown
from polytrain.text.secret_names import HIDDEN

if TYPE_CHECKING:
    from polytrain.config.validation_config import ValidationConfig
    from polytrain.data.shards.assignment import RunDataset

_ELSEWHERE = frozenset({"name", "storage_path", "storage_filesystem"})
"""A run's place, which isn't part of its configuration."""

_SECRET = frozenset({"worker_runtime_env", "ray_remote_kwargs"})
"""May have passwords and keys as values."""

_MOST_COLUMNS = 200
"""Columns of a data set whose names are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How a run was configured, in values that JSON can hold."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Every option of `ScalingConfig`, `RunConfig` and `ValidationConfig`, by where a user sets it:
    `run_config.failure_config.max_failures`."""

    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name: number of rows and columns, names of the first columns, what is done to them, and
    whether the rows are split over the workers."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Distribution → version, in the driver."""

    cluster: str = ""
    """Where the workers are, and why there; empty for an inline run."""


def configuration_in(written: Mapping[str, Any]) -> Configuration:
    """Read a configuration from the journal; a later version may have written more."""
    known = {each.name for each in fields(Configuration)}
    return Configuration(**{name: value for name, value in written.items() if name in known})


def options_of(
    scaling: ScalingConfig, run: RunConfig, validation: ValidationConfig | None = None
) -> Mapping[str, Any]:
    """Return the options of a run's configs, by where a user sets them.

    Functions and other objects are named by their type. Of what may hold secrets there are only
    the names, and `…` is in place of what is secret by its name.
    """
    given = {"scaling_config": scaling, "run_config": run, "validation_config": validation}
    return {
        name: value
        for config, each in given.items()
        if each is not None
        for name, value in _options(config, each)
    }


def chosen(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that aren't this version's defaults."""
    defaults = options_of(ScalingConfig(), RunConfig())
    return {
        name: value
        for name, value in options.items()
        if name not in defaults or value != defaults[name]
    }


def datasets_of(datasets: Sequence[RunDataset]) -> Mapping[str, Mapping[str, Any]]:
    """Return what is known of each data set before it is read for training."""
    return {
        each.name: {
            "rows": each.source.info.num_rows,
            "columns": list(each.source.info.columns[:_MOST_COLUMNS]),
            "num_columns": len(each.source.info.columns),
            "transform": _described(each.config.transform),
            "split": each.is_split,
        }
        for each in datasets
    }


def _options(path: str, config: Any) -> Iterator[tuple[str, Any]]:
    for each in fields(config):
        value, name = getattr(config, each.name), f"{path}.{each.name}"
        if is_dataclass(value):
            yield from _options(name, value)
        elif each.name in _SECRET:
            yield name, _names_alone(value)
        elif each.name not in _ELSEWHERE:
            yield name, shown(_described(value), each.name)


def _described(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _described(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _names_alone(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _names_alone(each) for name, each in value.items()}
    return None if value is None else HIDDEN
