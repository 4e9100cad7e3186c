"""The training that bench_overhead measures: a number of steps at a time, whenever it is told to.

Run as a script, it is the bare peer. Functions are made in functions, so that they travel by value:
no worker has this module.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

Report = Callable[[dict[str, Any]], None]
Window = Callable[[int, int], None]
"""Takes so many steps, and reports after every so-and-so-many; after none if that is 0."""


def on_command(
    build: Callable[[Report], Window], report: Report
) -> Callable[[dict[str, Any]], None]:
    """A training function that takes its steps when it is told to, and tells what they have taken.

    Args:
        build: makes what is trained.
        report: whom it tells how it goes.
    """

    def train(config: dict[str, Any]) -> None:
        window = build(report)
        with socket.socket(socket.AF_UNIX) as referee:
            referee.connect(config["address"])
            with referee.makefile("rw") as commands:
                for command in commands:
                    steps, every = json.loads(command)
                    begun = time.perf_counter()
                    window(steps, every)
                    commands.write(f"{time.perf_counter() - begun}\n")
                    commands.flush()

    return train


def torch_window() -> Callable[[Report], Window]:
    """A small network with DDP, on one batch."""

    def build(report: Report) -> Window:
        import torch
        from torch.nn import Linear, ReLU, Sequential
        from torch.nn.functional import cross_entropy
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        layers = Sequential(Linear(256, 512), ReLU(), Linear(512, 256), ReLU(), Linear(256, 10))
        model = DistributedDataParallel(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        features, labels = torch.randn(64, 256), torch.randint(10, (64,))

        def window(steps: int, every: int) -> None:
            for step in range(1, steps + 1):
                loss = cross_entropy(model(features), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                metrics = {"loss": loss.item()}
                if every and step % every == 0:
                    report(metrics)

        return window

    return build


def xgboost_window() -> Callable[[Report], Window]:
    """A booster for each window, evaluated on its training rows after every round."""

    def build(report: Report) -> Window:
        import numpy as np
        import xgboost

        random = np.random.default_rng(0)
        features = random.random((10_000, 10))
        matrix = xgboost.QuantileDMatrix(features, features.sum(axis=1), nthread=1)
        parameters = {"nthread": 1, "max_depth": 4}

        class AfterRound(xgboost.callback.TrainingCallback):
            def __init__(self, every: int) -> None:
                self._every = every

            def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
                metrics = {"train-rmse": evals_log["train"]["rmse"][-1]}
                if self._every and (epoch + 1) % self._every == 0:
                    report(metrics)
                return False

        def window(steps: int, every: int) -> None:
            xgboost.train(
                parameters,
                matrix,
                num_boost_round=steps,
                evals=[(matrix, "train")],
                callbacks=[AfterRound(every)],
                verbose_eval=False,
            )

        return window

    return build


def main() -> None:
    """One worker of a bare peer."""
    framework, address, *details = sys.argv[1:]
    config = {"address": address}
    if framework == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        on_command(torch_window(), _unheard)(config)
        dist.destroy_process_group()
    else:
        from xgboost.collective import CommunicatorContext

        with CommunicatorContext(**json.loads(details[0])):
            on_command(xgboost_window(), _unheard)(config)


def _unheard(metrics: dict[str, Any]) -> None:
    """What takes the place of a report where nobody listens."""


if __name__ == "__main__":
    main()
