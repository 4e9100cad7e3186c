"""The collectives and the context that Ray Train gives a training function, and what it returns."""

import json
import os

import ray.train
import ray.train.collective
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    context = ray.train.get_context()
    name = "from rank 0" if context.get_world_rank() == 0 else None
    shared = ray.train.collective.broadcast_from_rank_zero(name)
    ray.train.collective.barrier()
    ray.train.report({"shared": shared, "workers": context.get_world_size()})
    return {"name": context.get_experiment_name(), "local": context.get_local_world_size()}


trainer = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="collectives", storage_path=os.path.join(os.getcwd(), "storage")),
)
result = trainer.fit()
print("RESULT", json.dumps({"returned": result.return_value}))
