"""Users' metrics as plain values, and by name: `a/b` is the entry `b` of a dict `a`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from polytrain.text import strict_json
from polytrain_plugins.type_names import a_type

_SMALL_IS_GOOD = re.compile(
    r"(?:m?log)?loss|m?error|err|(?:cross|x)?entropy|deviance|r?mse|rmsle|mae|mape|nll|ppl|"
    r"perplexity|wer|cer|fid"
)


def words_of(name: str) -> list[str]:
    """Return the words of a metric's name, in lower case."""
    return re.split(r"[^a-z0-9]+", name.casefold())


def is_good_when_small(name: str) -> bool:
    """Return whether smaller is better by the metric's name, as for a loss."""
    return any(map(_SMALL_IS_GOOD.fullmatch, words_of(name)))


def named_metric(metrics: Mapping[str, Any], name: str) -> Any:
    """Return the metric of this name.

    Raises:
        KeyError: there is none.
    """
    if name in metrics:
        return metrics[name]
    value: Any = metrics
    for key in name.split("/"):
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[key]
    return value


def copied(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain metrics for a user's function, which may change them: the run uses these."""
    # A condition gets a hundred reports after each: only nested values take a call.
    return {
        name: _copied(value) if type(value) in _NESTED else value for name, value in metrics.items()
    }


_NESTED = frozenset({dict, list})


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return copied(value)
    return [_copied(each) for each in value] if isinstance(value, list) else value


def flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested metrics as one level: `{"a": {"b": 1}}` is `{"a/b": 1}`."""
    return dict(_entries(metrics))


def single_values(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the metrics that fit into a line, each with its name; none that are lists."""
    single = bool | int | float | str
    return (entry for entry in _entries(metrics) if isinstance(entry[1], single))


def _entries(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as plain values: arrays and tensors of one element become numbers.

    Raises:
        TypeError: a metric isn't a number, a string, or a list or dict of them, or a text isn't
            valid Unicode.
        ValueError: they are nested too deeply for the run's journal, or two have one name.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"report takes a dict of metrics, not {a_type(metrics)}. "
            'Pass it by name: report({"loss": …}).'
        )
    try:
        plain = {_name(name): _plain(str(name), value) for name, value in metrics.items()}
        _expect_own_names(plain, metrics)
    except RecursionError:
        raise ValueError(
            "The metrics are nested in far too many levels, or one of them contains itself."
        ) from None
    # Leave three levels: a value is in a list in a column in a list in the journal's line.
    if any(isinstance(value, dict | list) for value in plain.values()):
        strict_json.expect_bounded(plain, strict_json.DEEPEST - 3)
    return plain


def _expect_own_names(plain: Mapping[str, Any], metrics: Mapping[Any, Any]) -> None:
    """Raise ValueError if two metrics have one name: trackers and the page would show one."""
    if len(plain) == len(metrics) and not any(isinstance(value, dict) for value in plain.values()):
        return
    names = Counter(name for name, _ in _entries(metrics))
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(
            f"Two metrics are named {twice[0]!r}: the entry b of a dict a is named 'a/b', and a "
            "number is named as its text. Give one of them another name."
        )


def _plain(name: str, value: Any) -> Any:
    if _is_plain(value):
        return value
    if isinstance(value, Mapping):
        return {_name(key): _plain(f"{name}/{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in value]
    try:
        # Most frameworks' tensors have `item`; TensorFlow's convert to an array, which has it.
        # `item` refuses more than one element. Other objects are returned unchanged.
        number = value.item() if hasattr(value, "item") else _as_array(value).item()
    except (ValueError, RuntimeError, TypeError):
        number = value
    if _is_plain(number):
        return number
    if type(number) is int:
        raise TypeError(
            f"The metric {name!r} is {number}, a whole number of more than 64 bits. Report it as a "
            "float or a string."
        )
    if type(number) is str:
        raise _not_unicode(f"The metric {name!r} is {number!r}")
    raise TypeError(
        f"The metric {name!r} is of the type {type(value).__name__}, which can't be stored. Report "
        "a number, a string, or a list or dict of them; of an array, for example its mean."
    )


def _name(given: Any) -> str:
    name = str(given)
    if not _is_unicode(name):
        raise _not_unicode(f"A metric is named {name!r}")
    return name


def _not_unicode(what: str) -> TypeError:
    return TypeError(
        f"{what}, which isn't valid Unicode, as a file name may be. "
        "Report text.encode(errors='replace').decode()."
    )


def _as_array(value: Any) -> Any:
    # Import it late: a run that reports plain numbers doesn't need numpy.
    import numpy as np

    return np.asarray(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value can be sent and stored as it is."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        return _is_unicode(value)
    return value is None or type(value) in (bool, float)


def _is_unicode(text: str) -> bool:
    # File names that aren't valid UTF-8 contain lone surrogates.
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
