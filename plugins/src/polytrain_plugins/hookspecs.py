"""The whole extension surface: one hook that provides backends, seven that observe a run.

A choice between several is a class (`Backend`); a notification of all is a hook. Observer hooks
are called in the process that called `fit()`, in the order of the events, and may take any subset
of the arguments. Each observer has a thread of its own, and a run doesn't wait for it: one that is
slow gets events late, and may miss some of very many. One that raises is logged and not called
again; it never ends a run.

`stop` ends the run after its next checkpoint: `stop("the loss has diverged")`. It may be kept, and
called later by any thread. `Result.stopped` has the observer's class and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pluggy

from polytrain_plugins.backend import Backend
from polytrain_plugins.events import Attempt, CheckpointInfo, Outcome, Report, RunInfo

PROJECT = "polytrain"

Stop = Callable[[str], None]
"""Stops the run; its argument is the reason."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function or method as the implementation of the hook of its name."""


class BackendHooks:
    """Implemented by the module that an entry point of the group `polytrain.backends` names."""

    @hookspec
    def polytrain_backends(self) -> Iterable[type[Backend]]:  # type: ignore[empty-body]  # a spec has no body
        """Return the backend classes of this distribution. Importing them imports no framework."""


class ObserverHooks:
    """Implemented by observers: `RunConfig(observers=…)`, or entry points `polytrain.observers`."""

    @hookspec
    def polytrain_run_started(self, run: RunInfo, stop: Stop) -> None:
        """`fit()` has checked everything and is about to start workers."""

    @hookspec
    def polytrain_attempt_started(self, run: RunInfo, attempt: Attempt, stop: Stop) -> None:
        """The worker processes of an attempt are about to be started.

        For this hook and `polytrain_attempt_ended` a run waits, for up to a second.
        """

    @hookspec
    def polytrain_reported(self, run: RunInfo, report: Report, stop: Stop) -> None:
        """Rank 0 has reported metrics."""

    @hookspec
    def polytrain_rank_reported(self, run: RunInfo, report: Report, stop: Stop) -> None:
        """A rank has reported metrics: any rank, rank 0 included.

        Those of ranks above 0 come within about two seconds, many at once. Workers send them to the
        driver only if an observer has this hook.
        """

    @hookspec
    def polytrain_checkpoint_committed(
        self, run: RunInfo, checkpoint: CheckpointInfo, stop: Stop
    ) -> None:
        """A checkpoint has been committed: no later failure loses it.

        A slow observer may get this when later ones have had it deleted (`num_to_keep`).
        """

    @hookspec
    def polytrain_checkpoint_validated(
        self, run: RunInfo, checkpoint: CheckpointInfo, stop: Stop
    ) -> None:
        """A checkpoint was validated. What that has returned is among the checkpoint's metrics."""

    @hookspec
    def polytrain_attempt_ended(
        self, run: RunInfo, attempt: Attempt, outcome: Outcome, stop: Stop
    ) -> None:
        """An attempt has ended: all its processes are gone. The next one hasn't started."""

    @hookspec
    def polytrain_run_ended(self, run: RunInfo, outcome: Outcome) -> None:
        """The run is over, and all its resources are released."""
