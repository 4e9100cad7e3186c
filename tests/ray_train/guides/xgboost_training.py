"""Trees by XGBoost in a training function, with the report callback and a saved model."""

import json
import os

import numpy as np
import ray
import ray.train
import xgboost
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.xgboost import RayTrainReportCallback, XGBoostTrainer


def train_func(config):
    shard = ray.train.get_dataset_shard("train").materialize().to_pandas()
    valid = ray.train.get_dataset_shard("validation").materialize().to_pandas()
    dtrain = xgboost.DMatrix(shard.drop("target", axis=1), shard["target"])
    dvalid = xgboost.DMatrix(valid.drop("target", axis=1), valid["target"])
    xgboost.train(
        config["params"],
        dtrain=dtrain,
        num_boost_round=10,
        evals=[(dtrain, "train"), (dvalid, "validation")],
        callbacks=[RayTrainReportCallback(frequency=5, checkpoint_at_end=True)],
    )


# Tasks of Ray Data run beside the workers.
ray.init(num_cpus=4)
draws = np.random.default_rng(0)
rows = [
    {"a": float(a), "b": float(b), "target": float(a > b)} for a, b in draws.uniform(size=(400, 2))
]
trainer = XGBoostTrainer(
    train_func,
    train_loop_config={"params": {"objective": "binary:logistic", "eval_metric": ["logloss"]}},
    scaling_config=ScalingConfig(num_workers=2),
    datasets={
        "train": ray.data.from_items(rows[:300]),
        "validation": ray.data.from_items(rows[300:]),
    },
    run_config=RunConfig(
        name="xgboost-training",
        storage_path=os.path.join(os.getcwd(), "storage"),
        checkpoint_config=CheckpointConfig(
            num_to_keep=1,
            checkpoint_score_attribute="validation-logloss",
            checkpoint_score_order="min",
        ),
    ),
)
result = trainer.fit()
model = RayTrainReportCallback.get_model(result.checkpoint)
print(
    "RESULT",
    json.dumps({"rounds": model.num_boosted_rounds(), "names": sorted(result.metrics)}),
)
