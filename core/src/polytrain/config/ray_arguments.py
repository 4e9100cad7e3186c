"""Ray Train's arguments of configurations: their order, and why polytrain lacks some of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeVar

from polytrain_plugins import InvalidJobError, Problem
from polytrain_plugins.close_names import did_you_mean

logger = logging.getLogger(__name__)

AnyClass = TypeVar("AnyClass", bound=type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """An argument that only Ray Train has."""

    default: Any = None
    """Ray Train's; this value changes nothing, and is accepted."""

    instead: str
    """What to use instead, as a sentence."""

    is_harmless: bool = False
    """Whether any value is accepted, with a warning, because training is the same without it."""


def takes_ray_arguments(
    order: tuple[str, ...], absent: Mapping[str, Absent]
) -> Callable[[AnyClass], AnyClass]:
    """A decorator for a dataclass whose fields are given by name.

    Args:
        order: Ray Train's arguments in their order, for calls without names.
        absent: those that aren't fields.
    """

    def decorate(cls: AnyClass) -> AnyClass:
        own_init = cls.__init__  # type: ignore[misc]  # of the class itself, not of an instance
        known = {field.name for field in fields(cls)}

        @wraps(own_init)
        def __init__(self: Any, *given: Any, **named: Any) -> None:
            values = {**dict(zip(order, given, strict=False)), **named}
            problems = [*_form_problems(cls.__name__, order, given, named)]
            for name in [name for name in values if name not in known]:
                problems += _problems(cls.__name__, name, values.pop(name), absent, known)
            if problems:
                raise InvalidJobError(tuple(problems))
            own_init(self, **values)

        cls.__init__ = __init__  # type: ignore[misc]  # the same
        return cls

    return decorate


def _form_problems(
    cls: str, order: tuple[str, ...], given: tuple[Any, ...], named: Mapping[str, Any]
) -> Iterator[Problem]:
    if len(given) > len(order):
        yield Problem(
            field=cls,
            what=f"{len(given)} values without names are more than it takes",
            remedy=f"The order is: {', '.join(order)}",
        )
    for name in [name for name in order[: len(given)] if name in named]:
        yield Problem(field=f"{cls}.{name}", what="it is given twice", remedy="Give it by name")


def _problems(
    cls: str, name: str, value: Any, absent: Mapping[str, Absent], known: set[str]
) -> Iterator[Problem]:
    found = absent.get(name)
    if found is None:
        remedy = f"{did_you_mean(name, sorted(known))}It has: {', '.join(sorted(known))}"
        yield Problem(field=f"{cls}.{name}", what="there is no such field", remedy=remedy)
    elif value is None or value == found.default or (not value and not found.default):
        return
    elif found.is_harmless:
        logger.warning("%s.%s isn't used. %s.", cls, name, found.instead)
    else:
        what = f"polytrain has no counterpart of this argument of Ray Train; it is {value!r}"
        yield Problem(field=f"{cls}.{name}", what=what, remedy=found.instead)


_REMOVED = "Leave it out: Ray Train has removed it too"

SCALING: dict[str, Any] = {
    "order": (
        "trainer_resources",
        "num_workers",
        "use_gpu",
        "resources_per_worker",
        "placement_strategy",
        "accelerator_type",
        "label_selector",
        "use_tpu",
        "topology",
        "elastic_resize_monitor_interval_s",
    ),
    "absent": {
        "trainer_resources": Absent(
            instead="Leave it out: a run is driven by the process that calls fit()"
        ),
        "use_tpu": Absent(
            default=False,
            instead='Reserve the chips by their resource: resources_per_worker={"TPU": 4}',
        ),
        "topology": Absent(
            instead="Leave it out. To choose the nodes of one slice, use label_selector with the "
            "labels that they have"
        ),
        "elastic_resize_monitor_interval_s": Absent(
            default=60.0,
            instead="A run grows as soon as the cluster has room",
            is_harmless=True,
        ),
    },
}

FAILURE: dict[str, Any] = {
    "order": (
        "max_failures",
        "fail_fast",
        "controller_failure_limit",
        "max_preemption_failures",
        "relax_collectives_on_preemption",
        "preemption_grace_s",
    ),
    "absent": {
        "fail_fast": Absent(default="DEPRECATED", instead=_REMOVED),
        "controller_failure_limit": Absent(
            default=-1,
            instead="There is no controller process; ScalingConfig.start_timeout_s limits the "
            "wait for resources",
            is_harmless=True,
        ),
        "max_preemption_failures": Absent(
            default=-1, instead="Leave it out: preemptions never count as failures"
        ),
        "relax_collectives_on_preemption": Absent(
            default=False,
            instead="Leave it out: before a preemption all ranks make a checkpoint together",
        ),
        "preemption_grace_s": Absent(
            default=0.0,
            instead="All ranks end together, once their checkpoint is committed",
            is_harmless=True,
        ),
    },
}

CHECKPOINT: dict[str, Any] = {
    "order": (
        "num_to_keep",
        "checkpoint_score_attribute",
        "checkpoint_score_order",
        "checkpoint_frequency",
        "checkpoint_at_end",
    ),
    "absent": {
        "checkpoint_at_end": Absent(
            default=True,
            instead="Training without a training function always saves at its end",
            is_harmless=True,
        ),
    },
}

RUN: dict[str, Any] = {
    "order": (
        "name",
        "storage_path",
        "storage_filesystem",
        "failure_config",
        "checkpoint_config",
        "callbacks",
        "worker_runtime_env",
        "logging_config",
        "sync_config",
        "verbose",
        "stop",
        "progress_reporter",
        "log_to_file",
    ),
    "absent": {
        "logging_config": Absent(
            instead='logging.getLogger("polytrain").setLevel(…) sets the level',
            is_harmless=True,
        ),
        "sync_config": Absent(default="DEPRECATED", instead=_REMOVED),
        "verbose": Absent(
            default="DEPRECATED", instead="Use progress=False for less output", is_harmless=True
        ),
        "progress_reporter": Absent(default="DEPRECATED", instead="Use observers=(…,)"),
        "log_to_file": Absent(
            default="DEPRECATED",
            instead="The run's directory has a log of each rank",
            is_harmless=True,
        ),
    },
}

DATA: dict[str, Any] = {
    "order": ("datasets_to_split", "execution_options", "enable_shard_locality"),
    "absent": {
        "execution_options": Absent(
            instead="Set them on the Ray data set itself: dataset.context.execution_options"
        ),
        "enable_shard_locality": Absent(
            default=True,
            instead="Which worker reads which rows doesn't depend on their nodes",
            is_harmless=True,
        ),
    },
}

VALIDATION: dict[str, Any] = {"order": ("fn", "task_config", "ray_remote_kwargs"), "absent": {}}

VALIDATION_TASK: dict[str, Any] = {"order": ("fn_kwargs", "timeout_s"), "absent": {}}
