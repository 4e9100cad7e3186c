"""What is wrong with where a run's workers would be: this system, or the Ray cluster that there is.

Found before any starts.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polytrain.config.configs import ScalingConfig
from polytrain.config.constraints import working_directory
from polytrain.policy.labels import Labels, allowed
from polytrain.policy.scaling import WorkerCount, worker_capacity
from polytrain.text.described import numbered
from polytrain.workers.processes.zygote_connection import is_started_interpreter
from polytrain_plugins import Problem
from polytrain_plugins.close_names import did_you_mean

_NOT_MEANT = ("node:", "accelerator_type:", "object_store_memory", "bundle_")
"""Prefixes of Ray's internal resources, which nobody requests by hand."""


def refused_by_ray(scaling: ScalingConfig) -> Iterator[Problem]:
    """Yield what Ray itself refuses of resources and labels. Ray is initialised."""
    import ray

    nothing = ray.remote(_nothing)
    resources = scaling.resources
    others: dict[str, Any] = {
        name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")
    }
    options: list[tuple[str, dict[str, Any]]] = [
        ("resources_per_worker", {"resources": others, "num_gpus": resources.get("GPU", 0)}),
        *(("label_selector", {"label_selector": dict(each)}) for each in scaling.label_selectors),
    ]
    for field, each in options:
        try:
            nothing.options(**each)
        except (TypeError, ValueError) as error:
            yield Problem(
                field=f"ScalingConfig.{field}",
                what=f"Ray refuses it: {error}",
                remedy="Give what Ray takes for an actor",
            )


def _nothing() -> None: ...


def label_problems(
    scaling: ScalingConfig,
    totals: Mapping[str, Mapping[str, float]],
    labels: Mapping[str, Labels],
) -> Iterator[Problem]:
    """Yield a problem for each label selector whose workers no living nodes can hold."""
    field = "ScalingConfig.label_selector"
    wanted = [scaling.label_selector_of(worker) for worker in range(scaling.min_workers)]
    for selector in scaling.label_selectors:
        able = [totals[node] for node in allowed(labels, [selector]) if node in totals]
        if not able:
            yield Problem(
                field=field,
                what=f"no node of the cluster has labels that meet {dict(selector)}. They have: "
                f"{_listed(labels)}",
                remedy="Give labels that nodes have, or start a node with them: ray start "
                "--labels=name=value",
            )
            continue
        workers = wanted.count(selector) + scaling.standby
        capacity = worker_capacity(able, scaling.resources)
        if workers > capacity.workers:
            yield Problem(
                field=field,
                what=f"{numbered(workers, 'worker', 'need')} nodes "
                f"with labels that meet {dict(selector)}, and those can hold {capacity.workers}: "
                f"{capacity.reason}",
                remedy="Use fewer workers, or add nodes with these labels",
            )


def _listed(labels: Mapping[str, Labels]) -> str:
    """Return what the nodes' labels are, without those that only name a node."""
    nodes = [
        {name: value for name, value in each.items() if name != "ray.io/node-id"}
        for each in labels.values()
    ]
    shown = list(dict.fromkeys(str(each) if each else "no labels" for each in nodes))
    return "; ".join(shown[:10]) + ("; …" if len(shown) > 10 else "")


def cluster_problems(
    scaling: ScalingConfig,
    node_totals: Sequence[Mapping[str, float]],
    autoscaler_totals: Mapping[str, float] | None = None,
) -> Iterator[Problem]:
    """Yield a problem if the workers wouldn't fit on the cluster even if nothing else ran there.

    Args:
        autoscaler_totals: resources of the cluster at its largest, over all nodes; None without an
            autoscaler.
    """
    least = scaling.min_workers
    if autoscaler_totals is not None:
        capacity = worker_capacity([autoscaler_totals], scaling.resources)
        if least + scaling.standby > capacity.workers:
            yield _too_many(
                scaling, capacity, "the cluster's autoscaler can add", [autoscaler_totals]
            )
        # The autoscaler chooses the nodes.
        return
    capacity = worker_capacity(node_totals, scaling.resources)
    if least + scaling.standby > capacity.workers:
        yield _too_many(scaling, capacity, "the cluster can hold", node_totals)
    elif strategy_problem := _strategy_problem(scaling, node_totals):
        yield strategy_problem


def _too_many(
    scaling: ScalingConfig,
    capacity: WorkerCount,
    than: str,
    node_totals: Sequence[Mapping[str, float]],
) -> Problem:
    least = scaling.min_workers
    if least > capacity.workers:
        return Problem(
            field="ScalingConfig.num_workers",
            what=f"{least} is more than {than}: {capacity.reason}",
            remedy=f"Use num_workers={capacity.workers}"
            if capacity.workers
            else _meant(scaling, node_totals) or "Ask for less per worker",
        )
    return Problem(
        field="ScalingConfig.standby",
        what=f"{scaling.standby} besides {numbered(least, 'worker')} is more than {than}: "
        f"{capacity.reason}",
        remedy=f"Use standby={capacity.workers - least}",
    )


def _meant(scaling: ScalingConfig, node_totals: Sequence[Mapping[str, float]]) -> str:
    """Return which resources of the nodes may be meant by one that none of them has."""
    there = {name for totals in node_totals for name in totals}
    known = sorted(name for name in there if not name.startswith(_NOT_MEANT))
    for name, amount in scaling.resources.items():
        meant = did_you_mean(name, known)
        if amount > 0 and name not in there and meant:
            return f"{meant}The nodes have: {', '.join(known)}"
    return ""


def _strategy_problem(
    scaling: ScalingConfig, node_totals: Sequence[Mapping[str, float]]
) -> Problem | None:
    """What makes the placement strategy impossible on these nodes."""
    workers = 0 if scaling.is_elastic else scaling.max_workers
    held = [worker_capacity([totals], scaling.resources).workers for totals in node_totals]
    able = sum(count > 0 for count in held)
    if scaling.placement_strategy == "STRICT_SPREAD" and workers > able:
        return Problem(
            field="ScalingConfig.placement_strategy",
            what=f"STRICT_SPREAD needs a node for each of {numbered(workers, 'worker')}, and "
            f"{able} of the cluster's {len(held)} can hold one",
            remedy="Use 'SPREAD', which takes as many nodes as there are",
        )
    if scaling.placement_strategy == "STRICT_PACK" and workers > max(held):
        return Problem(
            field="ScalingConfig.placement_strategy",
            what=f"STRICT_PACK needs {numbered(workers, 'worker')} on one node, and no node can "
            f"hold more than {max(held)}",
            remedy="Use 'PACK', which takes as few nodes as it can",
        )
    return None


def guard_problems() -> Iterator[Problem]:
    """Yield a problem if a script makes this call while a spawned process imports it.

    Such a process runs the whole script before its own work, so each would start a run.
    """
    imported = sys.modules.get("__mp_main__")
    # While the script runs, the module has only this name; afterwards it is also `__main__`. In
    # other processes it is an alias of the main module, which runpy, profilers, debuggers replace.
    is_spawned = imported is not None and imported.__name__ == "__mp_main__"
    if is_spawned and imported is not sys.modules["__main__"]:
        yield Problem(
            field="if __name__ == '__main__'",
            what="a process that multiprocessing has spawned imports this script, and would start "
            "the run again",
            remedy="Write `if __name__ == '__main__':` above the lines that make the trainer and "
            "call fit()",
        )


def import_problems() -> Iterator[Problem]:
    """Yield a problem if a worker process, or its zygote, imports the module that makes this call.

    The workers that the call starts would import it too, without end.
    """
    frame = sys._getframe() if is_started_interpreter() else None
    while frame is not None:
        name = frame.f_globals.get("__name__")
        is_imported = name != "__main__" and name in sys.modules
        if frame.f_code.co_name == "<module>" and is_imported:
            yield Problem(
                field="if __name__ == '__main__'",
                what=f"a worker process imports {frame.f_code.co_filename} as the module {name}, "
                "and would start workers again",
                remedy="Write `if __name__ == '__main__':` above the lines that start them. If "
                "another module of that name is meant, rename the file",
            )
            return
        frame = frame.f_back


def directory_problems() -> Iterator[Problem]:
    """Yield a problem if this process's working directory is gone, or it may write no files."""
    for what, remedy in working_directory():
        yield Problem(field="os.getcwd()", what=what, remedy=remedy)
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        # Checkpoints and much else are written there first.
        yield Problem(
            field="TMPDIR",
            what=str(error.strerror),
            remedy="Set it to a directory in which this user may create files",
        )


def system_problems() -> Iterator[Problem]:
    """Yield required system calls that the kernel or a container's sandbox refuses."""
    for name, attempt in _NEEDED.items():
        try:
            attempt()
        except (OSError, AttributeError) as error:
            yield Problem(
                field="ScalingConfig.num_workers",
                what=f"worker processes need {name}, which this system refuses ({error})",
                remedy="Use Linux 5.3 or newer, allow it in the container's seccomp profile, or "
                "train in this process with num_workers=0",
            )


def _watch_process() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _share_memory() -> None:
    os.close(os.memfd_create("polytrain-probe"))


def _listen() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0polytrain-probe-{secrets.token_hex(8)}")


_NEEDED: dict[str, Callable[[], None]] = {
    "pidfd_open": _watch_process,
    "memfd_create": _share_memory,
    "abstract Unix sockets": _listen,
}
