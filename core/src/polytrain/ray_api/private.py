"""The private names of Ray that polytrain uses, each with the reason.

What a newer version may rename stands here alone.
"""

from __future__ import annotations

from typing import Any


def cluster_state() -> Any:
    """Return the state of nodes and resources; Ray's own libraries use this name too."""
    from ray._private.state import state

    return state


def is_worker_process() -> bool:
    """Whether this process runs an actor or a task: it may end while its job goes on.

    Ray has no public name for this that doesn't log a warning.
    """
    from ray._private.worker import WORKER_MODE, global_worker

    return bool(global_worker.mode == WORKER_MODE)


def stored_status(key: str) -> Any:
    """Return what Ray's own processes have stored under a key, such as the autoscaler's report."""
    from ray.experimental.internal_kv import _internal_kv_get

    return _internal_kv_get(key)


def count_executions(context: Any, executions: int) -> None:
    """Set how often a pipeline was executed, by which shuffles differ from epoch to epoch.

    After a restart the count is lost, and there is no other way to set it.
    """
    context._execution_idx = executions


def use_in_process(context: Any) -> None:
    """Make this `DataContext` the process's, which Ray Data reads some settings from."""
    type(context)._set_current(context)
