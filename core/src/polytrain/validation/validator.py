"""The protocol between a run and the validator that calls its validation function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.functions.pickling import THIS_MACHINE, note_unreadable, unpickled
from polytrain.text.metrics import plain_metrics
from polytrain_plugins.type_names import a_type


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationTask:
    """One call of the validation function."""

    checkpoint: Checkpoint
    fn_kwargs: Mapping[str, Any]
    timeout_s: float | None
    """Maximum seconds that it may take; None for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """The function has returned these metrics."""

    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotValidated:
    """The function has returned no metrics."""

    reason: str
    """One line: the exception's type and text, or a description of the process's end."""

    traceback: str = ""
    """The function's own traceback, as Python prints it; empty if there is none."""

    error: bytes | None = None
    """The pickled exception, if it can be pickled."""

    output: str = ""
    """The last lines of the process's standard error, if it couldn't send an exception."""

    timed_out: bool = False


class Validator(Protocol):
    """Calls a run's validation function in a separate process."""

    def validate(self, task: ValidationTask) -> Validated | NotValidated | None:
        """Call the function, and wait for its outcome; return None if it was cancelled."""

    def cancel(self) -> None:
        """Cancel the running call, and all later ones. Any thread may call this."""

    def close(self) -> None:
        """Release everything, after the last call has ended."""


def call(
    pickled: bytes,
    task: ValidationTask,
    references: Sequence[Any] = (),
    *,
    host: str = THIS_MACHINE,
) -> dict[str, Any]:
    """Call a pickled validation function in this process, and return its metrics.

    Args:
        pickled: the function.
        task: the call's arguments.
        references: references to Ray objects, which `pickled_for_ray` has left out.
        host: the address of this process's node.

    Raises:
        TypeError: it doesn't return a dict of metrics.
        Exception: any exception of the function.
    """
    try:
        function = unpickled(pickled, references)
    except Exception as error:
        note_unreadable(error, "The validation function", host)
        raise
    returned: Any = function(task.checkpoint, **task.fn_kwargs)
    if not isinstance(returned, Mapping):
        raise TypeError(
            "The validation function must return a dict of metrics, and has returned "
            f"{a_type(returned)}."
        )
    return plain_metrics(returned)
