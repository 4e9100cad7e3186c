"""Checkpoints validated beside training."""

import json
import os
import tempfile

import ray.train
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig, ValidationConfig
from ray.train.torch import TorchTrainer


def validate(checkpoint):
    with checkpoint.as_directory() as directory, open(os.path.join(directory, "weight")) as file:
        return {"score": -abs(int(file.read()) - 2)}


def train_func():
    for step in range(1, 5):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                with open(os.path.join(directory, "weight"), "w") as file:
                    file.write(str(step))
                checkpoint = Checkpoint.from_directory(directory)
            has_one = checkpoint is not None
            ray.train.report({"step": step}, checkpoint=checkpoint, validation=has_one)


trainer = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    validation_config=ValidationConfig(fn=validate, ray_remote_kwargs={"num_cpus": 0}),
    run_config=RunConfig(
        name="validation",
        storage_path=os.path.join(os.getcwd(), "storage"),
        checkpoint_config=CheckpointConfig(checkpoint_score_attribute="score"),
    ),
)
result = trainer.fit()
best = result.get_best_checkpoint("score", "max")
with best.as_directory() as directory, open(os.path.join(directory, "weight")) as file:
    weight = int(file.read())
scores = sorted((metrics["step"], metrics["score"]) for _, metrics in result.best_checkpoints)
print("RESULT", json.dumps({"best": weight, "scores": scores}))
