"""A rank that computes wrongly: its weights differ from those of the other ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.journals import journal
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from polytrain import (
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.errors import FailureKind

STEPS = 6


def train(config: dict[str, Any]) -> None:
    import polytrain
    from polytrain.torch import TrainingState, prepare_model

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    if config["how"] == "own buffers":
        model = DistributedDataParallel(model, broadcast_buffers=False)
    else:
        model = prepare_model(model)
    if config["how"] == "own gradients":
        model.register_comm_hook(None, noop_hook)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    state = TrainingState(model=model, optimizer=optimizer)
    context = polytrain.get_context()
    rank = context.get_world_rank()
    x = torch.arange(12.0).reshape(6, 2) * (1 + rank)
    for step in range(state.restore().get("step", 0), STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        is_wrong = step == 3 and (config["how"] == "always" or context.get_attempt() == 0)
        if is_wrong and rank in config["ranks"]:
            with torch.no_grad():
                model.module[0].weight[0, 0] += 1e-6
        state.report({}, step=step + 1)


def fit(quiet: RunConfig, how: str, *, workers: int = 3, ranks: Any = (), **options: Any) -> Result:
    return make_trainer(
        "torch",
        train,
        train_loop_config={"how": how, "ranks": ranks},
        scaling_config=ScalingConfig(num_workers=workers, cluster="local"),
        run_config=dataclasses.replace(
            quiet, failure_config=FailureConfig(max_failures=-1), **options
        ),
    ).fit()


def test_an_attempt_ends_where_a_rank_differs_and_the_run_is_that_of_right_ranks(
    quiet: RunConfig,
) -> None:
    whole = fit(quiet, "nothing", digests=1)
    found = fit(quiet, "flip", ranks=(1,), digests=1)
    assert (whole.restarts, found.restarts) == (0, 1)
    [ended] = journal(Path(found.path), "AttemptEnded")
    failure = ended["failure"]
    assert (failure["kind"], failure["rank"]) == ("REPLICAS_DIFFER", 1)
    assert (
        "At step 4 rank 1 of 3 holds other values of what DDP trains in 'model'"
        in (failure["message"])
    )
    # Nothing that the wrong rank has had a part in was kept.
    launched = [each["step"] for each in journal(Path(found.path), "Launched")]
    assert launched == [0, 3]
    expected = whole.load_model()
    assert all(value.equal(expected[name]) for name, value in found.load_model().items())


def test_two_ranks_do_not_say_which_is_wrong(quiet: RunConfig) -> None:
    found = fit(quiet, "flip", workers=2, ranks=(1,), digests=1)
    [ended] = journal(Path(found.path), "AttemptEnded")
    assert ended["failure"]["kind"] == "CHECKPOINT_MISMATCH"
    assert "too few agree to tell which" in ended["failure"]["message"]


def test_without_digests_it_is_a_warning(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    found = fit(quiet, "flip", ranks=(2,))
    assert found.restarts == 0
    printed = "".join(capfd.readouterr())
    assert printed.count("At step 4 rank 2 of 3 holds other values") == 1
    assert printed.count("holds other values") == 1


@pytest.mark.parametrize("how", ["own buffers", "own gradients"])
def test_what_ddp_does_not_keep_alike_may_differ(
    quiet: RunConfig, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fit(quiet, how, workers=2, digests=1).restarts == 0
    assert "values" not in "".join(capfd.readouterr())


def test_a_rank_that_is_always_wrong_does_not_train_for_ever(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError) as caught:
        fit(quiet, "always", ranks=(1,), digests=1)
    assert caught.value.failures[0].kind is FailureKind.REPLICAS_DIFFER
