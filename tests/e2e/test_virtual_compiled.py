"""Virtual workers with `torch.compile`: code that another rank or attempt would make alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polytrain import FailureConfig, Result, RunConfig, ScalingConfig, make_trainer

EPOCHS, ROWS = 2, 40 + 20
"""Each epoch's last micro-batches are smaller: torch would compile the next ones for all sizes."""


def train(config: dict[str, Any]) -> None:
    """Rank 0 is killed in the second epoch of the first attempt, which compiled the small ones."""
    import os
    import signal

    import torch

    from polytrain import get_context
    from polytrain.torch import TrainingState, micro_batches, prepare_data_loader, prepare_model

    torch.manual_seed(1)
    x, y = torch.randn(ROWS, 64), torch.randint(10, (ROWS,))

    class Network(torch.nn.Module):
        """Statistics over a batch are summed by other code where the batch may have any size."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)
            self.norm = torch.nn.BatchNorm1d(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.nn.functional.dropout(self.norm(self.first(x)), 0.2))

    network = Network()
    if config["inside"]:
        network.compile(**config["options"])
    prepared = prepare_model(network)
    model = prepared if config["inside"] else torch.compile(prepared, **config["options"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    state = TrainingState(model=prepared, optimizer=optimizer)
    done = state.restore()
    loader = prepare_data_loader(
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=10, shuffle=True
        )
    )
    is_killed = config["is_killed"] and get_context().get_attempt() == 0
    for epoch in range(done.get("epoch", 0), EPOCHS):
        if is_killed and epoch == 1 and get_context().get_world_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for batch in loader:
            optimizer.zero_grad()
            for rows, labels in micro_batches(batch):
                loss = torch.nn.functional.cross_entropy(model(rows), labels)
                loss.backward()
            optimizer.step()
        state.report({"loss": loss}, epoch=epoch + 1)


def fit(path: Path, workers: int, **config: Any) -> Result:
    return make_trainer(
        "torch",
        train,
        train_loop_config={"inside": True, "options": {}, "is_killed": False, **config},
        scaling_config=ScalingConfig(num_workers=workers, virtual_workers=4, cluster="local"),
        run_config=RunConfig(
            storage_path=path, progress=False, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


@pytest.fixture(scope="module")
def on_one_worker(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Return the run of one worker that isn't killed, by what is compiled and how."""

    @functools.cache
    def run(inside: bool, dynamic: bool | None) -> Result:
        path = tmp_path_factory.mktemp("one")
        return fit(path, 1, inside=inside, options={"dynamic": dynamic})

    return run


# For which sizes code is compiled, and compiled models on several workers, are tested by
# `plugin_torch/test_virtual_workers` in `make test`, without waiting for a compiler of C++.
@pytest.mark.sweep
@pytest.mark.only_in_sweep
@pytest.mark.parametrize(
    ("workers", "inside", "dynamic", "is_killed"),
    [
        (1, True, None, True),
        (2, True, None, True),
        (3, True, None, True),
        (4, True, None, False),
        (3, True, True, True),
        (2, False, None, True),
    ],
)
def test_compiled_code_has_the_same_bits_on_any_rank_and_after_a_kill(
    on_one_worker: Callable[..., Result],
    tmp_path: Path,
    workers: int,
    inside: bool,
    dynamic: bool | None,
    is_killed: bool,
) -> None:
    whole = on_one_worker(inside, dynamic)
    result = fit(
        tmp_path, workers, inside=inside, options={"dynamic": dynamic}, is_killed=is_killed
    )
    assert result.restarts == is_killed
    assert result.why_not_exact == ()
    assert [each["loss"] for each in result.history] == [each["loss"] for each in whole.history]
    weights = whole.load_model()
    assert all(value.equal(weights[name]) for name, value in result.load_model().items())
