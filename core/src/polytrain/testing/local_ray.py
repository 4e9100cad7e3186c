"""One Ray for all tests of a process, and what runs have left of themselves there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

from polytrain.checkpoint.manifest import MANIFEST_NAME
from polytrain.checkpoint.staging import STAGING
from polytrain.testing.processes import eventually, title
from polytrain.workers.cluster import free_resources
from polytrain.workers.warm import kept_process

CPUS = 4

_MARK = "POLYTRAIN_CONFORMANCE_PROCESS"
"""A variable that all processes of this test session's runs inherit: others' runs are no leak."""


def local_ray() -> None:
    """Have a Ray, which ends with this process."""
    _mark_processes()
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


class LocalCluster:
    """A Ray of several nodes, all of them on this machine, as long as the block lasts."""

    def __enter__(self) -> LocalCluster:
        from ray.cluster_utils import Cluster

        _mark_processes()
        head = {"num_cpus": CPUS, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()  # type: ignore[no-untyped-call]

    @contextmanager
    def second_node(self) -> Iterator[None]:
        """Have another node, which may get lost."""
        node = self._cluster.add_node(num_cpus=1)
        self._cluster.wait_for_nodes()
        try:
            yield
        finally:
            self._cluster.remove_node(node, allow_graceful=False)


def _mark_processes() -> None:
    """Have what this process starts known as its own."""
    os.environ[_MARK] = str(os.getpid())


def our_processes() -> list[psutil.Process]:
    """Zygotes, trainers and agents that live, whichever run of this session they are of."""
    forked = [p for p in psutil.process_iter() if _is_marked(p) and "polytrain.workers" in title(p)]
    # Ray writes its titles over the environment: agents are known by whose they are.
    below = psutil.Process().children(recursive=True)
    agents = [process for process in below if "ray::Agent" in title(process)]
    return forked + agents


def _left_processes() -> list[psutil.Process]:
    # The one zygote that is kept for the next run is kept on purpose.
    return [process for process in our_processes() if process.pid != kept_process()]


def leftovers(run: Path) -> list[str]:
    """What a run that has ended should have taken with it: none of it is there at the end.

    Args:
        run: its directory.
    """
    # The kernel and Ray end in their own time what they have been told to end.
    eventually(lambda: not _left_processes(), seconds=10)
    left = [f"the process {process}" for process in _left_processes()]
    groups = ray.util.placement_group_table().values()
    left += [f"the placement group {g['name']}" for g in groups if g["state"] != "REMOVED"]
    # Ray counts in its own time, too.
    total = ray.cluster_resources().get("CPU")  # type: ignore[no-untyped-call]
    if not eventually(lambda: free_resources().get("CPU") == total, seconds=10):
        left.append(f"{free_resources().get('CPU')} of {total} CPUs are free")
    if (run / STAGING).exists():
        left.append(f"{run / STAGING}")
    checkpoints = (path for path in run.glob("checkpoints/*") if path.is_dir())
    left += [str(path) for path in checkpoints if not (path / MANIFEST_NAME).exists()]
    return left


def _is_marked(process: psutil.Process) -> bool:
    try:
        return bool(process.environ().get(_MARK) == str(os.getpid()))
    except psutil.Error:
        return False
