"""What training functions do with torch on two workers, besides the usual."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.sweeps import only_in_sweep

from polytrain import (
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)


def fit(quiet: RunConfig, function: Callable[[], None], workers: int = 2) -> dict[str, Any]:
    """The metrics that rank 0 has reported last."""
    scaling = ScalingConfig(num_workers=workers)
    trainer = make_trainer("torch", function, scaling_config=scaling, run_config=quiet)
    return dict(trainer.fit().metrics)


def uses_ddp() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join

    import polytrain
    from polytrain_torch import prepare_model, seed_everything

    seed_everything(3)
    rank = dist.get_rank()
    model = prepare_model(torch.nn.Linear(3, 1))
    weight = next(model.parameters())
    x, found = torch.randn(8, 3), {}

    def gradient(*parts: torch.Tensor) -> torch.Tensor:
        """Accumulated over the parts; the last one's backward pass sums over the ranks."""
        model.zero_grad()
        for part in parts[:-1]:
            with model.no_sync():
                model(part).sum().backward()
        model(parts[-1]).sum().backward()
        assert weight.grad is not None
        return weight.grad.clone()

    found["accumulated"] = torch.allclose(gradient(x[:4], x[4:]), gradient(x))
    everybodys = [torch.zeros(1, 3) for _ in range(2)]
    dist.all_gather(everybodys, gradient(x))
    found["averaged"] = torch.equal(*everybodys)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found["autocast"] = str(model(x).dtype)
    compiled = torch.compile(model, backend="eager")
    found["compiled"] = torch.equal(compiled(x), model(x))

    with Join([model]):
        for _ in range(2 + 3 * rank):
            model(x).sum().backward()
    found["joined"] = True
    dist.barrier()
    polytrain.report(found)


def test_accumulation_autocast_compile_and_join_work(quiet: RunConfig) -> None:
    assert fit(quiet, uses_ddp) == {
        "accumulated": True,
        "averaged": True,
        "autocast": "torch.bfloat16",
        "compiled": True,
        "joined": True,
    }


def scales_and_restores() -> None:
    import torch

    import polytrain
    from polytrain_torch import TrainingState, prepare_model

    model = torch.compile(prepare_model(torch.nn.Linear(3, 1)), backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model=model, optimizer=optimizer, scaler=scaler)
    done = state.restore()
    if not done:
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update(4.0)
        state.report({"scale": scaler.get_scale()}, step=1)
        # Without what every rank has reported, the next attempt would fail at the same step.
        polytrain.collective.barrier()
        raise OSError("once")
    polytrain.report({"scale": scaler.get_scale(), "step": done["step"]})


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(1), 2])
def test_a_compiled_model_and_a_scaler_go_on(quiet: RunConfig, workers: int) -> None:
    config = dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1))
    assert fit(config, scales_and_restores, workers) == {"scale": 4.0, "step": 1}


def initialises_again() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def has_unused_parameters() -> None:
    import torch

    from polytrain_torch import prepare_model

    class Unused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = prepare_model(Unused())
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (initialises_again, "initialize the default process group twice"),
        (has_unused_parameters, "find_unused_parameters=True"),
    ],
)
def test_what_torch_refuses_is_reported(
    quiet: RunConfig, function: Callable[[], None], message: str
) -> None:
    with pytest.raises(TrainingFailedError, match=message):
        fit(quiet, function)


def destroys_the_group() -> None:
    import torch.distributed as dist

    import polytrain

    polytrain.report({"ranks": dist.get_world_size()})
    dist.barrier()
    dist.destroy_process_group()


def test_the_group_may_be_destroyed_at_the_end(quiet: RunConfig) -> None:
    assert fit(quiet, destroys_the_group) == {"ranks": 2}
