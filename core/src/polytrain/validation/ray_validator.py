"""Validates checkpoints on a Ray cluster, each in a task with its own resources."""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from polytrain.functions.pickling import dumps, pickled_error
from polytrain.ray_api.state import with_placement
from polytrain.validation.validator import NotValidated, Validated, ValidationTask, call

logger = logging.getLogger(__name__)

_WAITS_S = 30.0
"""Seconds without resources after which a warning is logged."""


class RayValidator:
    """A `Validator` whose tasks end with the driver. Ray must be initialised."""

    def __init__(
        self, function: bytes, references: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        """
        Args:
            function: the validation function, pickled by `pickled_for_ray`.
            references: its references to Ray objects.
            options: options of `ray.remote`.
        """
        self._function = function
        self._references = list(references)
        placed = with_placement(options)
        # The task streams two items: the first shows that it has its resources, then the metrics.
        self._task: Any = ray.remote(_validated).options(**placed, num_returns="streaming")
        self._lock = threading.Lock()
        self._is_cancelled = threading.Event()
        self._running: Any = None
        self._has_warned = False

    def validate(self, task: ValidationTask) -> Validated | NotValidated | None:
        with self._lock:
            if self._is_cancelled.is_set():
                return None
            self._running = running = self._task.remote(
                self._function, self._references, dumps(task), sys.argv
            )
        try:
            # The wait for resources has no time limit. `cancel` ends both waits.
            if not ray.wait([running], timeout=_WAITS_S)[0]:
                self._warn_of_wait()
            ray.get(next(running))
            if not ray.wait([running], timeout=task.timeout_s)[0]:
                ray.cancel(running, force=True)
                return NotValidated(
                    reason=f"it took more than timeout_s={task.timeout_s:g} seconds, and was "
                    "cancelled",
                    timed_out=True,
                )
            return Validated(metrics=ray.get(next(running)))
        except (RayError, StopIteration) as error:
            return None if self._is_cancelled.is_set() else _not_validated(error)
        finally:
            self._running = None

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled.set()
            if self._running is not None:
                with contextlib.suppress(RayError):
                    ray.cancel(self._running, force=True)

    def _warn_of_wait(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "A checkpoint's validation has waited %g s for resources of the cluster. It starts "
            "when they are free, at the latest after the training. Use fewer workers, or ask for "
            "less in ValidationConfig.ray_remote_kwargs.",
            _WAITS_S,
        )

    def close(self) -> None:
        """Do nothing: Ray ends the process of a task."""


def _validated(
    function: bytes, references: list[Any], task: bytes, argv: list[str]
) -> Iterator[Mapping[str, Any]]:
    """Run in the task; the function may parse the driver's `sys.argv`."""
    sys.argv[:] = argv
    yield {}
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    yield call(function, pickle.loads(task), references, host=host)


def _not_validated(error: Exception) -> NotValidated:
    if isinstance(error, RayTaskError):
        cause = error.cause
        return NotValidated(
            reason=f"{type(cause).__name__}: {cause}",
            traceback=str(error),
            error=pickled_error(cause),
        )
    if isinstance(error, TaskCancelledError):
        return NotValidated(reason="it was cancelled")
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return NotValidated(reason=f"its process was lost: {first_line}")
