"""Ranks committed checkpoints, and selects those to delete."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from polytrain.config.configs import CheckpointConfig
from polytrain.text.metrics import named_metric
from polytrain_plugins.close_names import close_to
from polytrain_plugins.type_names import a_type


class Scored(Protocol):
    """The attributes of a checkpoint that retention reads."""

    @property
    def metrics(self) -> Mapping[str, Any]: ...


Kept = TypeVar("Kept", bound=Scored)


def ranked(checkpoints: Sequence[Kept], config: CheckpointConfig) -> list[Kept]:
    """Return the checkpoints from best to worst; among equal ones the newer first.

    Args:
        checkpoints: checkpoints in the order of their commits.
        config: without a score attribute, newer is better. A metric that is missing, None or NaN
            ranks worst.
    """
    newest_first = list(reversed(checkpoints))
    if config.checkpoint_score_attribute is None:
        return newest_first
    return sorted(newest_first, key=lambda checkpoint: best_first_key(checkpoint.metrics, config))


def missing_score(metrics: Mapping[str, Any], config: CheckpointConfig) -> str | None:
    """Return why these metrics don't rank a checkpoint; None if they do.

    A metric that is None or NaN exists, and ranks worst.
    """
    name = config.checkpoint_score_attribute
    if name is None:
        return None
    try:
        value = named_metric(metrics, name)
    except KeyError:
        near = close_to(name, metrics)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        known = ", ".join(map(repr, metrics)) or "none"
        return f"the reported metrics are {known}{meant}"
    if value is None or isinstance(value, int | float):
        return None
    return f"the metric {name!r} is {a_type(value)}, not a number"


def expendable(checkpoints: Sequence[Kept], config: CheckpointConfig) -> list[Kept]:
    """Return the checkpoints to delete: all but the `num_to_keep` best and the newest."""
    if config.num_to_keep is None:
        return []
    newest = checkpoints[-1:]
    return [c for c in ranked(checkpoints, config)[config.num_to_keep :] if c not in newest]


def best_first_key(metrics: Mapping[str, Any], config: CheckpointConfig) -> tuple[bool, float]:
    """Return the sort key that orders checkpoints from best to worst."""
    try:
        value = named_metric(metrics, str(config.checkpoint_score_attribute))
    except KeyError:
        value = None
    if not isinstance(value, int | float) or math.isnan(value):
        # It ranks below any number, including infinity.
        return True, 0.0
    return False, -float(value) if config.checkpoint_score_order == "max" else float(value)
