"""Validation in a training loop: metrics of all ranks, the best checkpoint, early stopping.

pip install '.[torch]' scikit-learn
python examples/torch_validation.py
"""

from __future__ import annotations

from digits import digits

from polytrain import (
    CheckpointConfig,
    DataConfig,
    RunConfig,
    ScalingConfig,
    get_dataset_shard,
    make_trainer,
)

EPOCHS = 100
PATIENCE = 3
"""Epochs without an improvement after which training stops."""


def network():
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 10)
    )


def accuracy(model, shard):
    """The share of digits that are recognised, over the rows of all ranks."""
    import torch

    right = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for batch in shard.iter_torch_batches(batch_size=256):
            right += torch.tensor(
                [(model(batch["image"]).argmax(1) == batch["digit"]).sum(), len(batch["digit"])]
            )
    model.train()
    torch.distributed.all_reduce(right)
    return (right[0] / right[1]).item()


def train():
    import torch

    from polytrain_torch import TrainingState, prepare_model, seed_everything

    seed_everything(0)
    model = prepare_model(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    state = TrainingState(model=model, optimizer=optimizer)
    done = state.restore()
    best, best_epoch = done.get("best", (0.0, 0))
    rows, valid = get_dataset_shard("train"), get_dataset_shard("valid")
    for epoch in range(done.get("epoch", 0) + 1, EPOCHS + 1):
        for batch in rows.iter_torch_batches(batch_size=32):
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["digit"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reached = accuracy(model, valid)
        if reached > best:
            best, best_epoch = reached, epoch
        state.report({"accuracy": reached}, epoch=epoch, best=(best, best_epoch))
        # All ranks have the same numbers, so all of them stop here.
        if epoch - best_epoch >= PATIENCE:
            break


def main():
    import torch

    (images, shown), (new_images, new_shown) = digits()
    result = make_trainer(
        "torch",
        train,
        datasets={
            "train": {"image": images[:1200], "digit": shown[:1200]},
            "valid": {"image": images[1200:], "digit": shown[1200:]},
        },
        dataset_config={"train": DataConfig(shuffle=True)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            checkpoint_config=CheckpointConfig(
                num_to_keep=1, checkpoint_score_attribute="accuracy", checkpoint_score_order="max"
            )
        ),
    ).fit()
    print(f"stopped after {len(result.history)} of {EPOCHS} epochs")
    model = network().eval()
    model.load_state_dict(result.load_model(checkpoint="best"))
    with torch.no_grad():
        predicted = model(torch.from_numpy(new_images)).argmax(1).numpy()
    print(f"{(predicted == new_shown).mean():.1%} of {len(predicted)} new digits are recognised")


if __name__ == "__main__":
    main()
