"""A node is lost: training continues on the rest, and grows again when a new node comes.

pip install '.[torch]'
python examples/elastic.py
"""

from __future__ import annotations

import itertools
import tempfile

import numpy as np
import ray
from ray.cluster_utils import Cluster

import polytrain
from polytrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, make_trainer
from polytrain_plugins import hookimpl


def train():
    import torch

    from polytrain_torch import TrainingState, prepare_model

    model = prepare_model(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = TrainingState(model=model, optimizer=optimizer)
    done = state.restore()  # nothing, on the first attempt
    shard = polytrain.get_dataset_shard("train")
    workers = polytrain.get_context().get_world_size()
    for epoch in itertools.count(done.get("epoch", 0)):
        # All workers together take 64 rows in a step, however many they are.
        for batch in shard.iter_torch_batches(global_batch_size=64, dtypes=torch.float32):
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state.report({"loss": loss, "workers": workers}, epoch=epoch + 1)


class SpotMachines:
    """Takes a node away when two workers have trained for a while, and brings another later."""

    def __init__(self):
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False},
            # Observers have threads of their own, where Ray can't set its signal handlers.
            shutdown_at_exit=False,
        )
        self.node = self.cluster.add_node(num_cpus=1)
        self.losses = 0
        self.change_at = 0

    @hookimpl
    def polytrain_attempt_started(self, attempt):
        self.workers = attempt.num_workers
        self.change_at = attempt.first_step + 20

    @hookimpl
    def polytrain_reported(self, report, stop):
        if report.step < self.change_at:
            return
        if self.workers == 1 and self.node is None:
            self.node = self.cluster.add_node(num_cpus=1)
        elif self.workers == 2 and self.losses == 0:
            self.cluster.remove_node(self.node)
            self.node, self.losses = None, 1
        elif self.workers == 2 and self.node is not None:
            stop("there are two workers again")


def main():
    x = np.random.default_rng(0).normal(size=(1000, 3))
    machines = SpotMachines()
    ray.init(address=machines.cluster.address, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as storage:
        result = make_trainer(
            "torch",
            train,
            datasets={"train": {"x": x, "y": x @ [1.0, -2.0, 0.5]}},
            scaling_config=ScalingConfig(num_workers=(1, 2)),
            run_config=RunConfig(
                storage_path=storage,
                failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
                observers=[machines],
            ),
        ).fit()
    sizes = [size for size, _ in itertools.groupby(each["workers"] for each in result.history)]
    print("workers: " + ", then ".join(map(str, sizes[-3:])))
    seconds = result.ledger.seconds
    recovery = sum(seconds[each] for each in ("detect", "teardown", "reschedule", "data_reload"))
    print(f"recovery: {recovery:.1f} s; epochs done again: {result.ledger.lost_steps}")
    ray.shutdown()
    machines.cluster.shutdown()


if __name__ == "__main__":
    main()
