"""What a driver was configured with, for people, without what is secret by its name. Pure.

A secret is a digest where it is stored, and `…` where it is shown."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from polytrain.config.configs import RunConfig, ScalingConfig
from polytrain.config.loop_config import recorded
from polytrain.functions.code_fingerprint import code_fingerprint
from polytrain.text.described import described, given_fields
from polytrain.text.secret_names import HIDDEN, is_secret, without_credentials
from polytrain_plugins import Backend

if TYPE_CHECKING:
    from polytrain.config.validation_config import ValidationConfig
    from polytrain.data.shards.assignment import RunDataset


_ROUNDS = 200_000

Replacement = Callable[[Any], str]
"""Returns what stands for a secret."""

_OPTION = re.compile(r"[-+~]*[A-Za-z_][\w./-]*")
"""What is before `=` in an argument of a program."""


def digests(salt: str) -> Replacement:
    """Return what makes digests of secrets, which are the same for the same salt alone.

    Whoever reads the salt can try values. Each try costs about 50 ms of a CPU, which puts a
    generated key or a good password out of reach, but neither a word nor a few digits.
    """
    return lambda value: _digest(code_fingerprint(value), salt)


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the names that have another value now → the value before, and now.

    A name that was added, or left out, hasn't changed.
    """
    common = {name: (before[name], value) for name, value in now.items() if name in before}
    # NaN is unequal to itself, and 1 equal to True.
    return {name: (was, is_) for name, (was, is_) in common.items() if repr(was) != repr(is_)}


def shown(value: Any, name: str = "") -> Any:
    """Return a value for people: with `…` for secrets, and for digests of them."""
    return without_secrets(value, lambda _: HIDDEN, name)


def without_secrets(value: Any, replacement: Replacement, name: str = "") -> Any:
    """Return a value in which others stand for secrets, within dicts, lists and tuples too.

    A secret is a value whose name says so, that of such an option in a list of arguments, and the
    password in an address. None, truth values and what is empty are never secret.

    Args:
        value: any value; an object is left as it is.
    """
    if is_secret(name):
        is_empty = isinstance(value, str | bytes | list | tuple | Mapping) and not value
        if is_empty or value is None or isinstance(value, bool):
            return value
        return replacement(value)
    if isinstance(value, Mapping):
        return {key: without_secrets(each, replacement, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = _items(value, replacement)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, str) and without_credentials(value) != value:
        return without_credentials(value, replacement(value))
    return value


def _items(items: Iterable[Any], replacement: Replacement) -> Iterator[Any]:
    """The items of a list, which may be the arguments of a program: `--api-key X`, `api-key=X`."""
    option, is_next = "", False
    for item in items:
        text = item if isinstance(item, str) else ""
        # What comes next is the option's value, whatever it begins with, unless it is an option.
        if text.startswith("--" if is_next else "-"):
            option = ""
        name, equals, value = text.partition("=")
        if option:
            yield without_secrets(item, replacement, option)
        elif equals and _OPTION.fullmatch(name):
            yield f"{name}={without_secrets(value, replacement, name)}"
        else:
            yield without_secrets(item, replacement)
        is_next = not option and text.startswith("-") and not equals and is_secret(text)
        if is_next:
            option = text


@lru_cache
def _digest(text: str, salt: str) -> str:
    # Not scrypt: some hardened builds of OpenSSL lack it.
    digest = hashlib.pbkdf2_hmac("sha256", text.encode(), salt.encode(), _ROUNDS, dklen=16)
    # The colon makes it a password where it stands in an address, so that it isn't shown there.
    return f"pbkdf2:{digest.hex()}"


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

    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """The training function's config, and the backend's options that aren't defaults, as one level:
    `{"optimizer": {"lr": 1}}` is `optimizer.lr`."""

    command: Sequence[str] = ()
    """The driver's command line, as it was typed; empty in a notebook."""

    script: str = ""
    """The driver's Python file; empty if it is a console command, or if there is none."""


def configuration_in(written: Mapping[str, Any]) -> Configuration:
    """Read a configuration from the journal; a later version may have written more."""
    known = {each.name for each in fields(Configuration)}
    read = {name: value for name, value in written.items() if name in known}
    return Configuration(**{**read, "command": tuple(read.get("command", ()))})


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
    defaults = {**options_of(ScalingConfig(), RunConfig()), **_validation_defaults()}
    return {
        name: value
        for name, value in options.items()
        if name not in defaults or value != defaults[name]
    }


def hyperparameters_of(config: Any, backend: Backend) -> Mapping[str, Any]:
    """Return a run's hyperparameters, as one level, with `…` for what is secret by its name.

    The user's own come first. An option of the backend with a name that they have, too, is named
    after the backend: `torch.timeout_s`.

    Args:
        config: `train_loop_config`; an object's fields count also where they are its defaults.
    """
    own = flattened(shown(described(recorded(config) or {})))
    options = flattened(shown(described(given_fields(backend))))
    return {
        **own,
        **{f"{backend.name}.{key}" if key in own else key: each for key, each in options.items()},
    }


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as one level, with dots: `{"a": {"b": 1}}` is `{"a.b": 1}`.

    A list stays one value, unless it has dicts: their names have the item's number, from 0.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            value = {str(number): each for number, each in enumerate(value)}
        if isinstance(value, Mapping) and value:
            found.update(flattened(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def datasets_of(datasets: Sequence[RunDataset]) -> Mapping[str, Mapping[str, Any]]:
    """Return what is known of each data set before it is read for training."""
    return {
        each.name: {
            "rows": each.source.info.num_rows,
            "columns": list(each.source.info.columns[:_MOST_COLUMNS]),
            "num_columns": len(each.source.info.columns),
            "transform": described(each.config.transform),
            "split": each.is_split,
        }
        for each in datasets
    }


def _validation_defaults() -> Mapping[str, Any]:
    from polytrain.config.validation_config import ValidationConfig

    given = options_of(ScalingConfig(), RunConfig(), ValidationConfig(fn=_validation_defaults))
    return {name: value for name, value in given.items() if name != "validation_config.fn"}


def _options(path: str, config: Any) -> Iterator[tuple[str, Any]]:
    for each in fields(config):
        value, name = getattr(config, each.name), f"{path}.{each.name}"
        if is_dataclass(value):
            yield from _options(name, value)
        elif each.name in _SECRET:
            yield name, _names_alone(value)
        elif each.name not in _ELSEWHERE:
            yield name, shown(described(value, has_fields=False), each.name)


def _names_alone(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _names_alone(each) for name, each in value.items()}
    return None if value is None else HIDDEN
