"""Checkpoints validated on a data set in memory: row by row, by a map, and by another trainer."""

import json
import os
import tempfile

import ray
import ray.data
import ray.train
import ray.train.torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, ValidationConfig, ValidationTaskConfig

STORAGE = os.path.join(os.getcwd(), "storage")

ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
validation_dataset = ray.data.from_items([{"x": float(number)} for number in range(8)])


def weight_of(checkpoint):
    with checkpoint.as_directory() as directory, open(os.path.join(directory, "weight")) as file:
        return int(file.read())


class Predictor:
    def __init__(self, checkpoint):
        self.weight = weight_of(checkpoint)

    def __call__(self, batch):
        return {"predicted": batch["x"] * self.weight}


def evaluate(config):
    weight = weight_of(config["checkpoint"])
    shard = ray.train.get_dataset_shard("validation")
    batches = shard.iter_torch_batches(batch_size=4)
    total = sum(float(batch["x"].sum()) for batch in batches)
    return {"score": weight * total / 8}


def validation_fn(checkpoint, how, epoch):
    if how == "rows":
        rows = validation_dataset.iter_rows()
        return {"score": weight_of(checkpoint) * sum(row["x"] for row in rows) / 8}
    if how == "map":
        predicted = validation_dataset.map_batches(
            Predictor, batch_size=4, concurrency=1, fn_constructor_kwargs={"checkpoint": checkpoint}
        )
        return {"score": predicted.mean("predicted")}
    trainer = ray.train.torch.TorchTrainer(
        evaluate,
        train_loop_config={"checkpoint": checkpoint},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=f"validation_of_epoch_{epoch}", storage_path=STORAGE),
        datasets={"validation": validation_dataset},
    )
    return trainer.fit().return_value


def train_func():
    for epoch, how in enumerate(("rows", "map", "trainer"), start=1):
        if ray.train.get_context().get_world_rank() != 0:
            ray.train.report({}, None)
            continue
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "weight"), "w") as file:
                file.write(str(epoch))
            ray.train.report(
                {"epoch": epoch},
                checkpoint=Checkpoint.from_directory(directory),
                validation=ValidationTaskConfig(fn_kwargs={"how": how, "epoch": epoch}),
            )


trainer = ray.train.torch.TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    validation_config=ValidationConfig(fn=validation_fn, ray_remote_kwargs={"num_cpus": 0}),
    run_config=RunConfig(name="validation_datasets", storage_path=STORAGE),
)
result = trainer.fit()
scores = sorted((metrics["epoch"], metrics["score"]) for _, metrics in result.best_checkpoints)
print("RESULT", json.dumps({"scores": scores}))
