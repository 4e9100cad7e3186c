"""Training functions for torch and Keras: every worker runs them, on its own rows."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import polytrain
from polytrain import Checkpoint


def train_torch(config: dict[str, Any]) -> None:
    """A small network on the digits, with DDP. It resumes from the last checkpoint."""
    import torch
    from single_process import torch_network
    from torch.nn.functional import cross_entropy

    from polytrain_torch import prepare_model

    context = polytrain.get_context()
    network = torch_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    first_epoch = 0
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is not None:
        state = torch.load(Path(checkpoint.path) / "state.pt", weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    model = prepare_model(network)
    train = polytrain.get_dataset_shard("train")
    valid = polytrain.get_dataset_shard("valid")

    for epoch in range(first_epoch, config["epochs"]):
        for batch in train.iter_torch_batches(batch_size=16, dtypes=torch.float32):
            labels = batch.pop("target").long()
            features = torch.stack(list(batch.values()), dim=1) / 16
            loss = cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            state = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, Path(directory) / "state.pt")
            polytrain.report(
                {"epoch": epoch, "loss": loss, "accuracy": _accuracy(network, valid)},
                checkpoint=Checkpoint.from_directory(directory)
                if context.get_world_rank() == 0
                else None,
            )
        half_way = epoch == config["epochs"] // 2 and context.get_attempt() == 0
        if half_way and context.get_world_rank() == config["kill_rank"]:
            os.kill(os.getpid(), signal.SIGKILL)


def _accuracy(network: Any, shard: Any) -> float:
    """Accuracy over the rows of all ranks."""
    import torch
    import torch.distributed as dist

    counts = torch.zeros(2)
    with torch.no_grad():
        for batch in shard.iter_torch_batches(batch_size=256, dtypes=torch.float32):
            labels = batch.pop("target").long()
            features = torch.stack(list(batch.values()), dim=1) / 16
            right = (network(features).argmax(dim=1) == labels).sum()
            counts += torch.tensor([float(right), float(len(labels))])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train_keras(config: dict[str, Any]) -> None:
    """The same with Keras: `model.fit` under the run's strategy."""
    from single_process import keras_network

    import polytrain_tf
    from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

    train = polytrain.get_dataset_shard("train")
    valid = polytrain.get_dataset_shard("valid")
    features = [name for name in train.schema().names if name != "target"]
    with polytrain_tf.strategy().scope():
        model = checkpointed_model() or keras_network()
    data, evaluation = (
        shard.to_tf(features, "target", as_matrix=True, batch_size=16) for shard in (train, valid)
    )
    model.fit(
        data,
        validation_data=evaluation,
        initial_epoch=checkpointed_epoch(),
        epochs=config["epochs"],
        callbacks=[ReportCallback()],
        shuffle=False,
        verbose=0,
    )
