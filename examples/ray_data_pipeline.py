"""Preprocess with Ray Data while a network trains.

pip install '.[torch]'
python examples/ray_data_pipeline.py
"""

from __future__ import annotations

import numpy as np
import ray

from polytrain import ScalingConfig, get_dataset_shard, make_trainer

ROWS = 20_000
EPOCHS = 2


def measured(batch):
    """Raw readings from row numbers; in your pipeline, files are read instead."""
    x = np.random.default_rng(int(batch["id"][0])).normal(size=(len(batch["id"]), 2))
    return {"id": batch["id"], "x": x.astype(np.float32)}


def labelled(batch):
    return {**batch, "y": batch["x"] @ np.float32([3.0, -1.0])}


def train():
    import torch

    from polytrain_torch import TrainingState, prepare_model

    model = prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model=model, optimizer=optimizer)
    done = state.restore()
    for epoch in range(done.get("epoch", 0), EPOCHS):
        seen = torch.zeros(2)
        for batch in get_dataset_shard("train").iter_torch_batches(batch_size=250):
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += torch.tensor([len(batch["id"]), batch["id"].sum()])
        torch.distributed.all_reduce(seen)
        rows, numbers = (int(each) for each in seen)
        state.report({"loss": loss, "rows": rows, "sum": numbers}, epoch=epoch + 1)


def main():
    ray.init(address="local", num_cpus=4, log_to_driver=False)
    pipeline = ray.data.range(ROWS).map_batches(measured).map_batches(labelled)
    result = make_trainer(
        "torch",
        train,
        datasets={"train": pipeline},
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
    print(f"rows in each epoch: {[metrics['rows'] for metrics in result.history]}")
    weights = result.load_model()["weight"][0].tolist()
    print(f"weights: {weights[0]:.2f}, {weights[1]:.2f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
