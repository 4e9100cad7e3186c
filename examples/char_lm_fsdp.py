"""A small language model of characters, sharded by FSDP2 on two workers and continued on one.

pip install '.[torch]'
python examples/char_lm_fsdp.py
"""

from __future__ import annotations

import inspect
import textwrap

import numpy as np

from polytrain import ScalingConfig, get_context, get_dataset_shard, make_trainer

TEXT = inspect.getsource(textwrap)[:4000]
LETTERS = sorted(set(TEXT))
CONTEXT = 32


def windows():
    """Each window of characters as numbers, `(rows, CONTEXT + 1)`."""
    numbers = np.array([LETTERS.index(letter) for letter in TEXT])
    return {"text": np.lib.stride_tricks.sliding_window_view(numbers, CONTEXT + 1).copy()}


def network():
    import torch

    class CharacterModel(torch.nn.Module):
        def __init__(self, width=48):
            super().__init__()
            self.letters = torch.nn.Embedding(len(LETTERS), width)
            self.places = torch.nn.Embedding(CONTEXT, width)
            self.layer = torch.nn.TransformerEncoderLayer(width, 4, 96, 0.0, batch_first=True)
            self.head = torch.nn.Linear(width, len(LETTERS))

        def forward(self, text):
            places = torch.arange(text.shape[1])
            mask = torch.nn.Transformer.generate_square_subsequent_mask(text.shape[1])
            hidden = self.letters(text) + self.places(places)
            return self.head(self.layer(hidden, src_mask=mask, is_causal=True))

    return CharacterModel()


def train(config):
    import torch

    from polytrain_torch import TrainingState, prepare_model, seed_everything

    seed_everything(0)
    model = prepare_model(network(), parallel_strategy="fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = TrainingState(model=model, optimizer=optimizer)
    first = state.restore().get("epoch", 0)
    workers = get_context().get_world_size()
    for epoch in range(first, config["epochs"]):
        for batch in get_dataset_shard("train").iter_torch_batches(global_batch_size=64):
            before, after = batch["text"][:, :-1], batch["text"][:, 1:]
            scores = model(before)
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), after.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state.report({"loss": loss, "workers": workers}, epoch=epoch + 1)


def main():
    data = {"train": windows()}
    first = make_trainer(
        "torch",
        train,
        train_loop_config={"epochs": 2},
        datasets=data,
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
    second = make_trainer(
        "torch",
        train,
        train_loop_config={"epochs": 4},
        datasets=data,
        scaling_config=ScalingConfig(num_workers=1),
        restore_from=first.checkpoint,
    ).fit()
    for epoch, report in enumerate([*first.history, *second.history], 1):
        print(f"epoch {epoch}, workers: {report['workers']}, loss {report['loss']:.2f}")


if __name__ == "__main__":
    main()
