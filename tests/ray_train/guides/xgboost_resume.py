"""Trees that a failed worker interrupts: the function trains the rounds that are left."""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import ray
import ray.train
import xgboost
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.xgboost import RayTrainReportCallback, XGBoostTrainer

FLAG = Path("failed").absolute()


class FailsOnce(xgboost.callback.TrainingCallback):
    def after_iteration(self, model, epoch, evals_log):
        if epoch == 5 and ray.train.get_context().get_world_rank() == 1 and not FLAG.exists():
            FLAG.touch()
            raise RuntimeError("a worker fails once")
        return False


def train_fn_per_worker(config):
    rounds, model = config["num_boost_round"], None
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        model = RayTrainReportCallback.get_model(checkpoint)
        rounds -= model.num_boosted_rounds()
    frame = ray.train.get_dataset_shard("train").materialize().to_pandas()
    matrix = xgboost.DMatrix(frame.drop("y", axis=1), label=frame["y"])
    xgboost.train(
        config["params"],
        matrix,
        num_boost_round=rounds,
        evals=[(matrix, "train")],
        xgb_model=model,
        callbacks=[
            RayTrainReportCallback({"loss": "train-rmse"}, frequency=2, checkpoint_at_end=True),
            FailsOnce(),
        ],
    )


# Tasks of Ray Data run beside the workers.
ray.init(num_cpus=4)
draws = np.random.default_rng(0).uniform(size=(400, 2))
rows = pd.DataFrame(draws, columns=["a", "b"]).assign(y=draws.sum(axis=1))
trainer = XGBoostTrainer(
    train_fn_per_worker,
    train_loop_config={"params": {"objective": "reg:squarederror"}, "num_boost_round": 10},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    datasets={"train": ray.data.from_pandas(rows)},
    run_config=RunConfig(
        name="trees",
        storage_path=os.path.abspath("storage"),
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=3),
    ),
)
result = trainer.fit()
later = Result.from_path(os.path.abspath("storage/trees"))
model = RayTrainReportCallback.get_model(later.checkpoint)
predicted = model.predict(xgboost.DMatrix(rows.drop("y", axis=1)))
summary = {
    "rounds": model.num_boosted_rounds(),
    "names": sorted(later.metrics),
    "kept": len(later.best_checkpoints),
    "fits": bool(np.abs(predicted - rows["y"]).mean() < 0.1),
    "error": result.error is None,
}
print("RESULT", json.dumps(summary))
