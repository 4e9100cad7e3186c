"""Handwritten digits by Hugging Face's Accelerate: two workers, one of which is killed on the way.

pip install '.[torch]' accelerate scikit-learn
python examples/accelerate_digits.py
"""

from __future__ import annotations

from pathlib import Path

from digits import EPOCHS, digits, kill_a_worker, print_result

from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer


def network():
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
    )


def train():
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader, TensorDataset

    from polytrain_torch.accelerate import report, restore

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    (images, shown), _ = digits()
    rows = TensorDataset(torch.from_numpy(images), torch.from_numpy(shown))
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(rows, batch_size=16, shuffle=True),
    )
    done = restore(accelerator)
    for epoch in range(done.get("epoch", 0), EPOCHS):
        kill_a_worker(epoch)
        loader.set_epoch(epoch)
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        metrics = {"loss": loss, "workers": accelerator.num_processes}
        report(accelerator, metrics, epoch=epoch + 1)


def main():
    import torch
    from safetensors.torch import load_file

    result = make_trainer(
        "torch",
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    model = network().eval()
    model.load_state_dict(load_file(Path(result.checkpoint.path, "model.safetensors")))
    _, (images, _) = digits()
    print_result(result, model(torch.from_numpy(images)).argmax(1).numpy())


if __name__ == "__main__":
    main()
