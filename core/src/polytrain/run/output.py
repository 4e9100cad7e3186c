"""Where the output of a run's workers goes: to the user, and to logs in the run's storage."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from polytrain.output.call_queues import CallQueues
from polytrain.output.worker_output import WorkerOutput
from polytrain.run.run import Run
from polytrain.storage.beneath import Beneath

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def opened_output(run: Run, queues: CallQueues) -> Iterator[WorkerOutput]:
    """Open the output of a run's workers. At the end the logs are in the run's storage.

    Args:
        run: the run.
        queues: write it.
    """
    with contextlib.ExitStack() as stack:
        if run.location.is_local:
            logs = Path(run.location.address, "logs")
        else:
            prefix = "polytrain-logs-"
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix)), "logs")
        output = WorkerOutput(
            logs,
            retry_s=run.location.retry_s,
            address=f"{run.location.address}/{_logs_of(run)}",
            show=run.spec.run_config.show_output,
            queues=queues,
        )
        if not run.location.is_local:
            stack.callback(_store_logs, run, logs, output)
        yield stack.enter_context(output)


def _logs_of(run: Run) -> str:
    """The directory of this driver's logs, below the run's. Object storage can't append."""
    return "logs" if run.location.is_local else f"logs/{run.lease.token:06d}"


def _store_logs(run: Run, logs: Path, output: WorkerOutput) -> None:
    """Store what is in a local directory. All logs together are retried as long as one file."""
    deadline = time.monotonic() + output.retry_s
    for name, _ in Beneath(logs).names():
        left_s = max(0.0, deadline - time.monotonic())
        storage = replace(run.location, retry_s=left_s).open()
        try:
            storage.put(logs / name, f"{_logs_of(run)}/{name}", move=False)
        except OSError as error:
            logger.warning("The log %s can't be stored: %s", name, error)
