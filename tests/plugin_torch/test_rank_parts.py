"""What counts as the same state on two ranks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from polytrain_torch.checkpoints.rank_parts import comparable, digest


def state() -> dict[str, Any]:
    return {
        "weights": torch.arange(6.0).reshape(2, 3),
        "step": torch.tensor(3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.empty(0),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "array": np.arange(4),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "name": "a", "worst": float("nan")}],
        "kinds": {torch.float32},
    }


def test_equal_states_are_the_same_in_any_order_and_layout() -> None:
    ours, theirs = state(), OrderedDict(reversed(state().items()))
    theirs["weights"] = ours["weights"].T.contiguous().T
    shared = ["a"]
    assert digest(ours) == digest(theirs)
    assert digest([shared, shared]) == digest([["a"], ["a"]])
    assert digest(torch.nn.Parameter(torch.ones(2))) == digest(torch.ones(2))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("weights", torch.arange(6.0).reshape(3, 2)),
        ("weights", torch.arange(6.0).reshape(2, 3).flip(0)),
        ("step", 3),
        ("half", torch.ones(2, dtype=torch.float16)),
        ("complex", torch.ones(2, dtype=torch.complex64) * 1j),
        ("sparse", torch.ones(2, 2).to_sparse()),
        ("array", np.arange(4)[::-1]),
        ("groups", [{"lr": 0.2, "betas": (0.9, 0.999), "name": "a", "worst": float("nan")}]),
        ("kinds", {torch.float16}),
    ],
)
def test_other_states_are_not(name: str, other: Any) -> None:
    assert digest(state()) != digest({**state(), name: other})


def test_what_is_of_a_module_without_ddp_counts_whole() -> None:
    module = torch.nn.BatchNorm1d(2)
    assert comparable(module, module.state_dict()).keys() == module.state_dict().keys()


@pytest.mark.parametrize("broadcasts", [True, False])
def test_a_model_that_the_user_has_wrapped_is_known_by_the_module_inside(
    broadcasts: bool,
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        wrapped = DistributedDataParallel(module, broadcast_buffers=broadcasts)
        for part in (module, wrapped):
            names = comparable(part, module.state_dict()).keys()
            assert ("1.running_mean" in names) is not broadcasts
            assert "0.weight" in names
    finally:
        dist.destroy_process_group()
