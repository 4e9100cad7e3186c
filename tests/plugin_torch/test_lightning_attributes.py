"""What a Lightning module and its callbacks carry beside their states, which checkpoints lack."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from polytrain_torch.lightning.attributes import Attributes
from polytrain_torch.lightning.private import Logged


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.outputs: list[float] = []


class Stops(EarlyStopping):
    best = 0.0


class Counts(lightning.Callback):
    number = 0


class CountsOpenly(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}


def trainer(*callbacks: lightning.Callback) -> Any:
    return SimpleNamespace(
        lightning_module=Module(),
        datamodule=None,
        callbacks=[*callbacks],
        strategy=object(),
        loggers=[],
        optimizers=[],
        lr_scheduler_configs=[],
    )


def appends(trained: Any) -> None:
    trained.lightning_module.outputs.append(1.0)


def counts_in_a_part(trained: Any) -> None:
    trained.lightning_module.part.calls += 1


def writes_what_is_not_saved(trained: Any) -> None:
    trained.lightning_module.part.scratch += 1


def counts(trained: Any) -> None:
    trained.callbacks[0].number += 1


def extends(trained: Any) -> None:
    trained.callbacks[1].best = 1.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (appends, "Module.outputs"),
        (counts_in_a_part, "Module.part.calls"),
        (writes_what_is_not_saved, "part.scratch"),
        (counts, "Counts.number"),
        (extends, "Stops.best"),
    ],
)
def test_what_a_restart_would_not_find_is_named(change: Callable[[Any], None], named: str) -> None:
    trained = trainer(Counts(), Stops("loss"))
    attributes = Attributes(trained)
    assert attributes.carried() is None
    change(trained)
    assert named in str(attributes.carried())


def test_what_is_saved_may_change_and_so_may_a_list_that_is_cleared() -> None:
    trained = trainer(CountsOpenly(), Stops("loss"))
    attributes = Attributes(trained)
    with torch.no_grad():
        trained.lightning_module.part.layer.weight += 1
    trained.lightning_module.part.seen += 1
    trained.lightning_module.eval()
    counts(trained)
    trained.callbacks[1].wait_count += 1
    # As Lightning does while DDP calls it.
    trained.lightning_module.forward = trained.lightning_module.forward
    appends(trained)
    trained.lightning_module.outputs.clear()
    assert attributes.carried() is None


def logs(steps: list[float], restarts_after: int) -> dict[str, float]:
    """The metrics of an epoch that logs these values, with a restart."""

    def begin() -> tuple[Any, Logged]:
        made = lightning.Trainer(
            logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu"
        )
        made.training = True
        return made, Logged(made)

    made, logged = begin()
    for number, value in enumerate(steps):
        if number == restarts_after:
            kept = logged.kept()
            made, logged = begin()
            logged.restore(kept)
        connector = made._logger_connector
        connector.on_batch_start([0.0, 0.0])
        results = made.fit_loop.epoch_loop._results
        for name, reduction in (("mean", "mean"), ("highest", "max"), ("sum", "sum")):
            results.log(
                *("training_step", name, torch.tensor(value)),
                on_step=name == "mean",
                reduce_fx=reduction,
                sync_dist_fn=made.strategy.reduce,
                batch_size=number + 1,
            )
        connector.on_batch_end()
    made._logger_connector.epoch_end_reached()
    made._logger_connector.on_epoch_end()
    return {name: float(value) for name, value in made.callback_metrics.items()}


@pytest.mark.parametrize("restarts_after", [1, 2])
def test_logged_means_continue(restarts_after: int) -> None:
    found = logs([3.0, 1.0, 2.0], restarts_after)
    assert found["mean_epoch"] == pytest.approx((3 + 2 * 1 + 3 * 2) / 6)
    assert (found["highest"], found["sum"], found["mean_step"]) == (3.0, 6.0, 2.0)
    assert found == logs([3.0, 1.0, 2.0], -1)
