"""Tells Lightning which of the run's workers this process is."""

from __future__ import annotations

import os

from polytrain import get_context
from polytrain_torch.libraries import needed

with needed("lightning"):
    from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment


class OfWorkers:
    """The part of an environment that knows the run's workers."""

    def world_size(self) -> int:
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        pass  # The run sets the number of workers.

    def global_rank(self) -> int:
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        pass  # The run sets the rank.


class WorkerEnvironment(OfWorkers, ClusterEnvironment):
    """Makes Lightning see each worker as a node with one device."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return get_context().get_world_rank()


class RayLightningEnvironment(OfWorkers, LightningEnvironment):
    """Tells Lightning which of the run's workers this process is."""

    def local_rank(self) -> int:
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        return get_context().get_node_rank()

    def teardown(self) -> None:
        """Keep this worker's environment variables for the next fit."""
