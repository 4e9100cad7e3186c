"""Trees by LightGBM in a training function, with its network parameters and report callback."""

import json
import os

import lightgbm
import numpy as np
import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.lightgbm import (
    LightGBMTrainer,
    RayTrainReportCallback,
    get_network_params,
    normalize_pandas_for_lightgbm,
)


def train_func(config):
    shard = ray.train.get_dataset_shard("train").materialize().to_pandas()
    shard = normalize_pandas_for_lightgbm(shard)
    rows = lightgbm.Dataset(shard.drop("target", axis=1), label=shard["target"])
    params = {
        "objective": "binary",
        "verbosity": -1,
        "tree_learner": "data_parallel",
        "pre_partition": True,
        **config,
        **get_network_params(),
    }
    lightgbm.train(
        params,
        rows,
        num_boost_round=8,
        valid_sets=[rows],
        valid_names=["train"],
        callbacks=[RayTrainReportCallback()],
    )


# Tasks of Ray Data run beside the workers.
ray.init(num_cpus=4)
draws = np.random.default_rng(0)
rows = [
    {"a": float(a), "b": float(b), "target": float(a > b)} for a, b in draws.uniform(size=(400, 2))
]
trainer = LightGBMTrainer(
    train_func,
    train_loop_config={"metric": "binary_logloss"},
    scaling_config=ScalingConfig(num_workers=2),
    datasets={"train": ray.data.from_items(rows)},
    run_config=RunConfig(
        name="lightgbm-training", storage_path=os.path.join(os.getcwd(), "storage")
    ),
)
result = trainer.fit()
model = RayTrainReportCallback.get_model(result.checkpoint)
print("RESULT", json.dumps({"trees": model.num_trees(), "names": sorted(result.metrics)}))
