"""Handwritten digits by PyTorch: DDP on two workers, one of which is killed on the way.

pip install '.[torch]' scikit-learn
python examples/torch_digits.py
"""

from __future__ import annotations

from digits import EPOCHS, digits, kill_a_worker, print_result

from polytrain import FailureConfig, RunConfig, ScalingConfig, get_context, make_trainer


def network():
    import torch

    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 4 * 4, 10),
    )


def train():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from polytrain_torch import TrainingState, prepare_data_loader, prepare_model, seed_everything

    seed_everything(0)
    (images, shown), _ = digits()
    loader = prepare_data_loader(
        DataLoader(
            TensorDataset(torch.from_numpy(images), torch.from_numpy(shown)),
            batch_size=16,
            shuffle=True,
        )
    )
    model = prepare_model(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in range(state.restore().get("epoch", 0), EPOCHS):
        kill_a_worker(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        workers = get_context().get_world_size()
        state.report({"loss": loss, "workers": workers}, epoch=epoch + 1)


def main():
    import torch

    result = make_trainer(
        "torch",
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    model = network()
    model.load_state_dict(result.load_model())
    _, (images, _) = digits()
    print_result(result, model(torch.from_numpy(images)).argmax(1).numpy())


if __name__ == "__main__":
    main()
