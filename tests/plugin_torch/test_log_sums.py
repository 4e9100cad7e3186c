"""What a trainer adds up between two logs comes back as it was, however it has grown."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polytrain_torch.transformers.private import LogSums


def trainer() -> Any:
    return SimpleNamespace(
        _tr_loss=torch.tensor(0.5),
        _total_loss_scalar=2.0,
        _globalstep_last_logged=3,
        _initial_global_step=0,
        _total_train_tokens=0,
        _finalize_training=lambda trial, rows, began: None,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )


def from_json(sums: LogSums) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(sums.as_json()))
    return read


@pytest.mark.parametrize("kept", [LogSums.kept, from_json])
def test_metrics_of_trl_come_back_after_each_step(
    kept: Callable[[LogSums], dict[str, Any]],
) -> None:
    own = trainer()
    sums, metrics = LogSums(own), own._metrics["train"]
    for step in range(1, 50):
        own._total_train_tokens = step * 100
        metrics["entropy"].append(step / 3)
        metrics["num_tokens"] = [step * 100]
        metrics["lengths"].append(step)
        metrics["text"].append("no number")
        if step == 20:
            # A log.
            metrics.clear()
        resumed = trainer()
        LogSums(resumed).restore(kept(sums))
        expected = {name: [*each] for name, each in metrics.items() if name != "text"}
        assert resumed._metrics == {"train": expected, "eval": {}}
        assert resumed._total_train_tokens == step * 100
    assert type(resumed._metrics["train"]["lengths"][0]) is int


def test_a_trainer_may_lack_the_step_at_which_it_began() -> None:
    """Transformers 5.5 has none, and a newer one may resume what it has saved."""
    older, newer = trainer(), trainer()
    del older._initial_global_step
    older._total_loss_scalar, newer._total_loss_scalar = 3.0, 4.0
    saved, newers = LogSums(older).kept(), LogSums(newer).kept()
    for each, kept in ((newer, saved), (older, newers)):
        LogSums(each).restore(kept)
        assert each._total_loss_scalar == kept["_total_loss_scalar"]
    assert newer._initial_global_step == 0


def test_a_list_that_changes_its_kind_comes_back_whole() -> None:
    own = trainer()
    sums, values = LogSums(own), own._metrics["train"]["mixed"]
    for value in (0.5, 0.25, 3, 0.125):
        values.append(value)
        resumed = trainer()
        LogSums(resumed).restore(sums.kept())
        assert [(type(each), each) for each in resumed._metrics["train"]["mixed"]] == [
            (type(each), each) for each in values
        ]


@pytest.mark.parametrize("more", [None, torch.tensor(0.25)])
def test_the_loss_that_is_about_to_be_added_counts(more: torch.Tensor | None) -> None:
    resumed = trainer()
    LogSums(resumed).restore(LogSums(trainer()).kept(more))
    assert resumed._tr_loss.item() == (0.5 if more is None else 0.75)
    assert resumed._globalstep_last_logged == 3
