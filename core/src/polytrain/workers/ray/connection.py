"""Connects a run to Ray: to a cluster that answers, or to one that is started for the run.

`ray.init()` joins the cluster that this machine joined last. If that cluster died without removing
its address, it retries for ten minutes. This module imports Ray only when a run connects to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from polytrain_plugins import InvalidJobError, Problem

logger = logging.getLogger(__name__)


_ANSWERS_WITHIN_S = 2.0


def address_to_join(environment: Mapping[str, str]) -> str | None:
    """Return the address to pass to `ray.init`; None for its default.

    Args:
        environment: this process's variables.

    Raises:
        InvalidJobError: `RAY_ADDRESS` names a cluster that doesn't answer.
    """
    asked = environment.get("RAY_ADDRESS", "")
    if asked == "local" or "://" in asked:
        return None
    address = asked if asked not in ("", "auto") else _recorded(environment)
    if not address or _answers(address):
        return None
    if asked:
        problem = Problem(
            field="RAY_ADDRESS",
            what=f"it is {asked!r}, and the Ray cluster at {address} doesn't answer",
            remedy="Start that cluster, or unset the variable to have one started for the run",
        )
        raise InvalidJobError((problem,))
    logger.warning(
        "The Ray cluster at %s, which this machine has joined before, doesn't answer: the run "
        "starts its own Ray. `ray stop --force` removes what is left of the old cluster.",
        address,
    )
    return "local"


def client_problem(address: str) -> Problem | None:
    """Return the problem of a Ray Client address: its driver is outside the cluster."""
    if not address.startswith("ray://"):
        return None
    return Problem(
        field="RAY_ADDRESS",
        what=f"{address} is a Ray Client address, and the driver must be in the cluster",
        remedy="Submit the script as a job: ray job submit --address http://<head node>:8265 "
        "--working-dir . -- python train.py. Or run it on a node of the cluster",
    )


def mismatch_problem(message: str) -> Problem | None:
    """Return the problem if Ray refuses a cluster that runs with different versions, else None.

    Args:
        message: message of the exception that `ray.init` has raised.
    """
    if not message.startswith("Version mismatch"):
        return None
    versions = " ".join(message.partition(":")[2].split())
    return Problem(
        field="RAY_ADDRESS",
        what=f"the Ray cluster has different versions. {versions}",
        remedy="Use the cluster's versions, or set RAY_ADDRESS=local to train without this cluster",
    )


def cluster_address(environment: Mapping[str, str]) -> str | None:
    """Return the configured cluster, or one that runs on this machine and answers; None if none.

    Args:
        environment: this process's variables.
    """
    asked = environment.get("RAY_ADDRESS", "")
    if asked == "local":
        return None
    if asked not in ("", "auto"):
        return asked
    recorded = _recorded(environment)
    return recorded if recorded and _answers(recorded) else asked or None


def _recorded(environment: Mapping[str, str]) -> str:
    """Return the address that Ray recorded on this machine; empty if there is none."""
    named = (environment[name] for name in ("RAY_TMPDIR", "TMPDIR") if name in environment)
    with contextlib.suppress(OSError):
        return Path(next(named, "/tmp"), "ray", "ray_current_cluster").read_text().strip()
    return ""


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_WITHIN_S):
            return True
    except ValueError:
        # Let Ray report an invalid address.
        return True
    except OSError:
        return False


@dataclass(slots=True)
class _Use:
    """The use of this process's Ray by runs in any of its threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    runs: int = 0
    is_ours: bool = False
    """Whether Ray was started for a run."""


_use = _Use()


@contextmanager
def running_ray() -> Iterator[None]:
    """Keep Ray initialised; if a run has started it, the last run to leave shuts it down.

    Raises:
        InvalidJobError: `RAY_ADDRESS` names a cluster that doesn't answer.
    """
    # Import it late: importing Ray takes a while.
    import ray

    with _use.lock:
        if not ray.is_initialized():
            _start()
            _use.is_ours = True
        _use.runs += 1
    try:
        yield
    finally:
        with _use.lock:
            _use.runs -= 1
            if _use.is_ours and not _use.runs:
                _use.is_ours = False
                ray.shutdown()


def _start() -> None:
    import ray

    # Ray announces a change of this default at every start.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Like `ray.init()`, this joins a cluster that RAY_ADDRESS or `ray start` names.
    try:
        ray.init(
            address_to_join(os.environ),
            configure_logging=True,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    except RuntimeError as error:
        problem = mismatch_problem(str(error))
        if problem is None:
            raise
        # Ray is only half connected.
        ray.shutdown()
        raise InvalidJobError((problem,)) from error
