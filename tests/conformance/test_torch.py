"""torch passes the kit, with a training function that brings a model."""

import tempfile
from pathlib import Path
from typing import ClassVar

import polytrain
from polytrain.testing import BackendConformance
from polytrain_torch import Torch


def train(config):
    import torch

    from polytrain_torch import prepare_model

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    parallel = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epochs = 0
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is not None:
        state = torch.load(Path(checkpoint.path) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        epochs = state["epochs"]
    shard = polytrain.get_dataset_shard("train")
    for epoch in range(epochs, 6):
        for batch in shard.iter_torch_batches(batch_size=20, dtypes=torch.float32):
            labels = batch.pop("label")
            predicted = parallel(torch.stack(list(batch.values()), dim=1))[:, 0]
            loss = torch.nn.functional.mse_loss(predicted, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            state = {"model": model.state_dict(), "epochs": epoch + 1}
            torch.save(state, Path(directory) / "state.pt")
            polytrain.report(
                {"loss": loss}, checkpoint=polytrain.Checkpoint.from_directory(directory)
            )


def build(directory):
    import torch

    model = torch.nn.Linear(3, 1)
    model.load_state_dict(torch.load(Path(directory) / "state.pt", weights_only=True)["model"])
    return model


class TestTorch(BackendConformance):
    backend = Torch()
    training_function = train
    prediction_options: ClassVar = {"model_fn": build, "features": ["x0", "x1", "x2"]}
