"""The private names of Ray that polytrain uses, each with the reason.

Only this module uses names that a newer version of Ray may rename.
"""

from __future__ import annotations

import os
from typing import Any


def cluster_state() -> Any:
    """Return the state of nodes and resources; Ray's own libraries also use this name."""
    from ray._private.state import state

    return state


def is_worker_process() -> bool:
    """Return whether this process runs an actor or a task: it may end before its job.

    Ray has no public name for this that doesn't log a warning.
    """
    from ray._private.worker import WORKER_MODE, global_worker

    return bool(global_worker.mode == WORKER_MODE)


def stored_status(key: str) -> Any:
    """Return the value that Ray's processes stored at a key, such as the autoscaler's report."""
    from ray.experimental.internal_kv import _internal_kv_get

    return _internal_kv_get(key)


def count_executions(context: Any, executions: int) -> None:
    """Set a pipeline's number of executions, which makes shuffles differ between epochs.

    A restart loses the count, and there is no other way to set it.
    """
    context._execution_idx = executions


def use_in_process(context: Any) -> None:
    """Make this the process's `DataContext`, from which Ray Data reads some settings."""
    type(context)._set_current(context)


def allow_blocking_get() -> None:
    """Keep Ray's warning about `ray.get` in async actors from an actor that calls it in threads."""
    os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
