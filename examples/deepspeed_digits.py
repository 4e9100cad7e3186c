"""Handwritten digits by DeepSpeed: ZeRO-3 on two workers, one of which is killed on the way.

pip install '.[torch]' deepspeed scikit-learn
python examples/deepspeed_digits.py
"""

from __future__ import annotations

from digits import EPOCHS, digits, kill_a_worker, print_result

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_context,
    make_trainer,
)


def network():
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
    )


def train():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from polytrain_torch import prepare_data_loader, seed_everything
    from polytrain_torch.deepspeed import initialize, report, restore

    torch.manual_seed(0)
    model = network()
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        config={"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 3}},
    )
    seed_everything(0)
    (images, shown), _ = digits()
    rows = TensorDataset(torch.from_numpy(images), torch.from_numpy(shown))
    loader = prepare_data_loader(DataLoader(rows, batch_size=16, shuffle=True))
    done = restore(engine)
    for epoch in range(done.get("epoch", 0), EPOCHS):
        kill_a_worker(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()
        report(engine, {"loss": loss, "workers": get_context().get_world_size()}, epoch=epoch + 1)


def main():
    import torch

    from polytrain_torch.deepspeed import load_model

    result = make_trainer(
        "torch",
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=1),
            # Each rank writes its own shards.
            checkpoint_config=CheckpointConfig(written_by="every_rank"),
        ),
    ).fit()
    model = network().eval()
    model.load_state_dict(load_model(result.checkpoint))
    _, (images, _) = digits()
    print_result(result, model(torch.from_numpy(images)).argmax(1).numpy())


if __name__ == "__main__":
    main()
