"""Forecast a time series with an LSTM, on windows that are cut from one long column.

pip install '.[torch]'
python examples/lstm_forecast.py
"""

from __future__ import annotations

import numpy as np

from polytrain import DataConfig, ScalingConfig, get_dataset_shard, make_trainer

PAST = 24
"""Hours that the model sees before the one that it forecasts."""


def demand(hours):
    """What a town consumes: a daily and a weekly wave, and noise."""
    hour = np.arange(hours)
    waves = np.sin(2 * np.pi * hour / 24) + 0.5 * np.sin(2 * np.pi * hour / (24 * 7))
    return (waves + np.random.default_rng(0).normal(scale=0.1, size=hours)).astype(np.float32)


def windows(series):
    """Past `(windows, PAST, 1)` and the next value of each."""
    past = np.lib.stride_tricks.sliding_window_view(series[:-1], PAST)
    return {"past": past[:, :, None].copy(), "next": series[PAST:]}


def network():
    import torch

    class Forecast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(1, 16, batch_first=True)
            self.last = torch.nn.Linear(16, 1)

        def forward(self, past):
            return self.last(self.lstm(past)[0][:, -1])[:, 0]

    return Forecast()


def train():
    import torch

    from polytrain_torch import TrainingState, prepare_model, seed_everything

    seed_everything(0)
    model = prepare_model(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    state = TrainingState(model=model, optimizer=optimizer)
    done = state.restore()
    shard = get_dataset_shard("train")
    for epoch in range(done.get("epoch", 0), 5):
        for batch in shard.iter_torch_batches(batch_size=64):
            loss = torch.nn.functional.mse_loss(model(batch["past"]), batch["next"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state.report({"loss": loss}, epoch=epoch + 1)


def main():
    import torch

    series = demand(24 * 7 * 20)
    known, new = windows(series[:-400]), windows(series[-400:])
    result = make_trainer(
        "torch",
        train,
        datasets={"train": known},
        dataset_config={"train": DataConfig(shuffle=True)},
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
    model = network()
    model.load_state_dict(result.load_model())
    with torch.no_grad():
        forecast = model(torch.from_numpy(new["past"])).numpy()
    print(f"error of the forecast: {np.abs(forecast - new['next']).mean():.2f}")
    print(f"error if the next hour is as the last: {np.abs(np.diff(series[-377:])).mean():.2f}")


if __name__ == "__main__":
    main()
