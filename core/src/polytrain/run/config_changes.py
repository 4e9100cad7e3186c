"""What `on_rollback` changes of a run, from one rollback to the next."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from polytrain.config.run_spec import RunSpec
from polytrain.errors import Failure, FailureKind
from polytrain.events.notices import Rollback
from polytrain.functions.pickling import code_of_job, pickled_with


class OnRollbackError(Exception):
    """The user's function has raised, or what it returned can't be sent to the workers."""

    def __init__(self, error: Exception | SystemExit, rollback: Rollback) -> None:
        super().__init__(f"FailureConfig.on_rollback: {type(error).__name__}: {error}")
        self.failure = Failure(
            kind=FailureKind.DIVERGED,
            rank=None,
            message=f"training diverges at {rollback}, and on_rollback has failed",
            traceback="".join(traceback.format_exception(error)),
        )


@dataclass(slots=True, kw_only=True)
class ConfigChanges:
    """What `on_rollback` makes of a request, from one rollback to the next."""

    spec: RunSpec
    """The original request."""

    function: Callable[..., Any]
    """The user's `on_rollback`."""

    _done: int = 0
    """Number of rollbacks that are dealt with."""

    _changes: dict[str, Any] = field(default_factory=dict)

    def after(self, rollbacks: Sequence[Rollback]) -> bytes | None:
        """Return the changed arguments of the request, pickled; None if there are none.

        Args:
            rollbacks: all of the run. A run that is resumed calls the function again, for each
                that has left no batches out.

        Raises:
            OnRollbackError: the function has failed.
        """
        for rollback in rollbacks[self._done :]:
            try:
                # What has left batches out, before the function was given, has changed nothing.
                if not rollback.skipped:
                    self._changes = self._changed(rollback)
            except (Exception, SystemExit) as error:
                raise OnRollbackError(error, rollback) from error
            self._done += 1
        if not self._changes:
            return None
        try:
            return pickled_with(*code_of_job(*self._changes.values()), value=self._changes)
        except Exception as error:
            raise OnRollbackError(error, rollbacks[-1]) from error

    def _changed(self, rollback: Rollback) -> dict[str, Any]:
        spec = self.spec
        # The function may change what it gets, and returns nothing then: that would be lost.
        if spec.train_loop_per_worker is not None:
            given = self._changes.get("train_loop_config", spec.train_loop_config)
            return {"train_loop_config": _returned(self.function(deepcopy(given), rollback))}
        backend: Any = self._changes.get("backend", spec.backend)
        params = _returned(self.function(deepcopy(backend.params), rollback))
        return {"backend": replace(backend, params=params)}


def _returned(config: Any) -> Any:
    if config is None:
        raise TypeError("it returned None; it has to return the configuration")
    return config
