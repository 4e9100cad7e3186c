"""A Ray of several nodes on one machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from polytrain.testing.leftovers import mark_processes

_CPUS = 4


class LocalRay:
    """A Ray with several nodes on this machine, for the duration of a block."""

    def __enter__(self) -> LocalRay:
        from ray.cluster_utils import Cluster

        mark_processes()
        head = {"num_cpus": _CPUS, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()  # type: ignore[no-untyped-call]

    @contextmanager
    def second_node(self) -> Iterator[None]:
        """Add a second node, which may be lost."""
        node = self._cluster.add_node(num_cpus=1)
        self._cluster.wait_for_nodes()
        try:
            yield
        finally:
            self._cluster.remove_node(node, allow_graceful=False)
