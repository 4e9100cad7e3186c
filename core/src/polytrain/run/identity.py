"""The identity of a run. Pure.

One part must stay the same when another driver resumes the run. The rest, the content, may change
then; but a finished run's result isn't returned for other content.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from polytrain.config.configs import DataConfig
from polytrain.config.loop_config import recorded
from polytrain.config.run_spec import RunSpec
from polytrain.functions.code_fingerprint import code_fingerprint, python_version
from polytrain.functions.users_code import name_of_type
from polytrain.record.configuration import digests, shown, without_secrets
from polytrain.record.entries import CODE_AFTER, CodeContent
from polytrain.text import strict_json
from polytrain.text.described import shown_name
from polytrain.text.secret_names import HIDDEN
from polytrain_plugins import Problem

START = "restore_from"
"""The starting point, in the content and as the field of a problem."""

_CONFIG = "train_loop_config"

_ORDERING = ("shuffle", "seed", "shards", "remainder", "pack", "group", "window_rows")
"""The options of a data set that determine the order of rows."""


def identity_of(
    spec: RunSpec,
    *,
    datasets: Mapping[str, DataConfig],
    facts: Mapping[str, Mapping[str, str]],
    start: str | None,
    salt: str,
) -> dict[str, Any]:
    """Return a run's identity, as plain values.

    Options that aren't plain values, such as a framework's objects, are recorded by type; the
    content holds their fingerprints. Values whose names mark them as secret become digests.

    Args:
        datasets: name → description of each data set.
        facts: name → facts about each data set's rows; see `fingerprint.facts`.
        start: `StartingPoint.known_as` of the run's starting point.
        salt: the digests' salt, the same for all drivers of a run.
    """
    given = _given(spec, salt)
    described = {name: plain(value) for name, value in given.items()}
    return {
        "salt": salt,
        "backend": spec.backend.name,
        "training function": spec.train_loop_per_worker is not None,
        "options": {name: value for name, value in described.items() if name != _CONFIG},
        "datasets": {
            name: {key: plain(getattr(config, key)) for key in _ORDERING}
            for name, config in datasets.items()
        },
        "content": {
            "python": python_version(),
            _CONFIG: described[_CONFIG],
            **_code(spec, datasets, given, described),
            "datasets": {name: dict(known) for name, known in facts.items()},
            START: start,
        },
    }


def code_of(spec: RunSpec, *, datasets: Mapping[str, DataConfig], salt: str) -> CodeContent:
    """Return the part of the content that is code and objects, as fingerprints.

    They change if functions or objects do: see `identity_of` for the arguments.
    """
    given = _given(spec, salt)
    return _code(spec, datasets, given, {name: plain(value) for name, value in given.items()})


def _code(
    spec: RunSpec,
    datasets: Mapping[str, DataConfig],
    given: Mapping[str, Any],
    described: Mapping[str, Any],
) -> CodeContent:
    function = spec.train_loop_per_worker
    return {
        "train_loop_per_worker": None if function is None else code_fingerprint(function),
        "objects": {
            name: code_fingerprint(value)
            for name, value in given.items()
            if not is_full(described[name])
        },
        "transforms": {
            name: code_fingerprint(config.transform) for name, config in datasets.items()
        },
    }


def _given(spec: RunSpec, salt: str) -> dict[str, Any]:
    """Return the backend's options and the function's config, with digests for secrets."""
    backend: Any = spec.backend
    options = {each.name: getattr(backend, each.name) for each in fields(backend) if each.init}
    return {
        **without_secrets(options, digests(salt)),
        _CONFIG: without_secrets(recorded(spec.train_loop_config), digests(salt)),
    }


def transform_fingerprint(datasets: Mapping[str, DataConfig]) -> str | None:
    """Return the fingerprint of the transform of the training data; None without one.

    Args:
        datasets: name → config. "train" counts; if none has this name, the first.
    """
    transforms = {name: config.transform for name, config in datasets.items()}
    function = transforms.get("train", next(iter(transforms.values()), None))
    return None if function is None else code_fingerprint(function)


def with_start_of(identity: Mapping[str, Any], before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an identity with the starting point of an earlier driver."""
    return {**identity, "content": {**identity["content"], START: before["content"][START]}}


def content_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield how a finished run's content differs from the request.

    Args:
        now: the identity that the user requests.
    """
    was, is_ = before["content"], now["content"]
    if not _same(was[_CONFIG], is_[_CONFIG]):
        what = _changed("", was[_CONFIG], is_[_CONFIG])
        yield Problem(field=_CONFIG, what=what, remedy=_OTHER_CONTENT)
    yield from _other_data(was["datasets"], is_["datasets"], in_columns=True, remedy=_OTHER_CONTENT)
    if was[START] != is_[START]:
        other = "it isn't the checkpoint that the run started from"
        what = "the run started without a checkpoint" if was[START] is None else other
        yield Problem(field=START, what=what, remedy=_OTHER_CONTENT)
    if was["python"] != is_["python"]:
        # Python versions compile the same code to different bytecode.
        return
    what = (
        "its code differs from the one that the run was trained with, or a value that it uses does"
    )
    # Training in this process may have changed what functions and objects hold, as a cache.
    known = (was, before.get(CODE_AFTER, was))
    function = is_["train_loop_per_worker"]
    if all(each["train_loop_per_worker"] != function for each in known):
        yield Problem(field="train_loop_per_worker", what=what, remedy=_OTHER_CONTENT)
    for name, fingerprint in is_["objects"].items():
        if all(each["objects"].get(name) != fingerprint for each in known):
            other = "an object in it, or the code of one, isn't as the run was trained with"
            yield Problem(field=name, what=other, remedy=_OTHER_CONTENT)
    for name, fingerprint in is_["transforms"].items():
        if all(each["transforms"].get(name) != fingerprint for each in known):
            field = f"dataset_config[{name!r}].transform"
            yield Problem(field=field, what=what, remedy=_OTHER_CONTENT)


def data_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield which data sets have other rows than those that a checkpoint was trained with.

    Which of their columns are read may change.

    Args:
        now: the identity that the user requests.
    """
    was, is_ = before["content"]["datasets"], now["content"]["datasets"]
    yield from _other_data(was, is_, in_columns=False, remedy=_OTHER_ROWS)


def _other_data(
    before: Mapping[str, Mapping[str, str]],
    now: Mapping[str, Mapping[str, str]],
    *,
    in_columns: bool,
    remedy: str,
) -> Iterator[Problem]:
    """
    Args:
        before: name → facts about each data set's rows.
        in_columns: whether the columns that are read count.
    """
    if not now:
        return
    # Imported here because it takes long.
    from polytrain.data.plan.position import COLUMNS, differences

    for name, facts in now.items():
        known = facts if in_columns else {key: facts[key] for key in facts if key != COLUMNS}
        if changes := differences(before.get(name, {}), known):
            yield Problem(
                field=f"datasets[{name!r}]",
                what="its rows differ from those that the run was trained with "
                f"({'; '.join(changes)})",
                remedy=remedy,
            )


_OTHER_ROWS = (
    "Pass the same data, or start a run under another name: with restore_from=… it starts from "
    "this run's checkpoint, on the data that you pass"
)

_OTHER_CONTENT = (
    "The run of this name is finished: give RunConfig another name, or if_finished='new' to train "
    "again under this name, or if_finished='return' to get its result"
)


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], *, mutable_on_resume: Iterable[str]
) -> Iterator[Problem]:
    """Yield how a run's identity has changed.

    Args:
        now: the identity that the user requests.
    """
    remedy = (
        "Pass what it was started with, or start a run under another name, with restore_from=… to "
        "start from this run's checkpoint"
    )
    for key, field in (("backend", "backend"), ("training function", "train_loop_per_worker")):
        if before[key] != now[key]:
            what = {True: "a training function", False: "none"}
            was, is_ = (what.get(each[key], repr(each[key])) for each in (before, now))
            yield Problem(
                field=field, what=f"the run was started with {was}, now it is {is_}", remedy=remedy
            )
            return
    for name in sorted(before["options"].keys() | now["options"].keys()):
        was, is_ = before["options"].get(name), now["options"].get(name)
        if not _same(was, is_) and name not in mutable_on_resume:
            yield Problem(field=shown_name(name), what=_changed(name, was, is_), remedy=remedy)
    if before["datasets"].keys() != now["datasets"].keys():
        names = (sorted(map(shown_name, one["datasets"])) for one in (before, now))
        was, is_ = (", ".join(each) or "none" for each in names)
        yield Problem(field="datasets", what=f"they were {was}, now they are {is_}", remedy=remedy)
        return
    for name, config in now["datasets"].items():
        for key, is_ in config.items():
            was = before["datasets"][name].get(key)
            if was != is_:
                field = f"dataset_config[{name!r}].{key}"
                yield Problem(field=field, what=_changed(key, was, is_), remedy=remedy)


def salt_of(identity: Mapping[str, Any]) -> str:
    """Return the salt of an identity's digests; a new one if it has none."""
    salt = identity.get("salt")
    return salt if isinstance(salt, str) else secrets.token_hex(16)


def options_of(identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the backend's options that the identity holds in full, with `…` for secrets."""
    return {
        name: shown(value, name) for name, value in identity["options"].items() if is_full(value)
    }


_TYPE = "python type"

_DEEPEST = strict_json.DEEPEST - 5
"""Levels of a value; around it and within its innermost one are the identity's own."""


def plain(value: Any, levels: int = _DEEPEST) -> Any:
    """Return the value as the journal would restore it.

    Objects, lists below so many levels, and numbers that no float can hold are named by their type.
    """
    try:
        found = json.loads(json.dumps(value))
        strict_json.expect_bounded(found, levels)
        return found
    except (TypeError, ValueError):
        if levels and isinstance(value, Mapping):
            return {str(key): plain(inner, levels - 1) for key, inner in value.items()}
        if levels and isinstance(value, list | tuple):
            return [plain(inner, levels - 1) for inner in value]
        return {_TYPE: name_of_type(type(value))}


def is_full(value: Any) -> bool:
    """Return whether a plain value holds no placeholder for an object."""
    if isinstance(value, Mapping):
        return _TYPE not in value and all(map(is_full, value.values()))
    return not isinstance(value, list) or all(map(is_full, value))


def _same(was: Any, is_: Any) -> bool:
    # NaN is unequal to itself.
    return bool(was == is_) or json.dumps(was, sort_keys=True) == json.dumps(is_, sort_keys=True)


def _changed(name: str, was: Any, is_: Any) -> str:
    if isinstance(was, Mapping) and isinstance(is_, Mapping):
        keys = [key for key in {**was, **is_} if was.get(key) != is_.get(key)]
        was, is_ = ({key: each[key] for key in keys if key in each} for each in (was, is_))
    what = f"the run was trained with {shown(was, name)!r}, now it is {shown(is_, name)!r}"
    is_hidden = (was, is_) != (shown(was, name), shown(is_, name))
    return f"{what} ({HIDDEN} is a secret by its name, and isn't shown)" if is_hidden else what
