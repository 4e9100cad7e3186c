"""A convolutional network: a DataLoader with worker processes, bfloat16, accumulated gradients.

pip install '.[torch]' scikit-learn
python examples/torch_images.py
"""

from __future__ import annotations

import contextlib

from digits import digits

from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

EPOCHS = 6
ACCUMULATED = 2
"""Batches for each step of the optimizer."""


def network():
    import torch

    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 10),
    )


def train():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from polytrain_torch import (
        TrainingState,
        get_device,
        prepare_data_loader,
        prepare_model,
        seed_everything,
    )

    seed_everything(0)
    (images, shown), _ = digits()
    rows = TensorDataset(torch.from_numpy(images), torch.from_numpy(shown))
    loader = prepare_data_loader(DataLoader(rows, batch_size=16, shuffle=True, num_workers=1))
    model = prepare_model(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    state = TrainingState(model=model, optimizer=optimizer)
    done = state.restore()
    device = get_device().type
    for epoch in range(done.get("epoch", 0), EPOCHS):
        for number, (batch, targets) in enumerate(loader, start=1):
            is_step = number % ACCUMULATED == 0 or number == len(loader)
            # Workers average their gradients in the last batch before a step only.
            with contextlib.nullcontext() if is_step else model.no_sync():
                with torch.autocast(device, torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(batch), targets)
                (loss / ACCUMULATED).backward()
            if is_step:
                optimizer.step()
                optimizer.zero_grad()
        state.report({"loss": loss}, epoch=epoch + 1)


def main():
    import torch

    result = make_trainer(
        "torch",
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()
    _, (images, shown) = digits()
    model = network().eval()
    model.load_state_dict(result.load_model())
    with torch.no_grad():
        predicted = model(torch.from_numpy(images)).argmax(1).numpy()
    print(f"loss after {len(result.history)} epochs: {result.metrics['loss']:.3f}")
    print(f"{(predicted == shown).mean():.1%} of {len(shown)} digits are recognised")


if __name__ == "__main__":
    main()
