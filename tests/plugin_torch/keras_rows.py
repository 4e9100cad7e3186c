"""The rows of docs/keras.md that are torch's own. This module is sent to the workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import keras_cases
from tests.keras_cases import CALLBACKS, REFUSED, Case, Part, X, Y, outcome, written


def loader(part: Part) -> Mapping[str, Any]:
    import torch

    rows = torch.utils.data.TensorDataset(torch.tensor(part.of(X)), torch.tensor(part.of(Y)))
    made: Any = torch.utils.data.DataLoader(rows, batch_size=part.batch)
    return {"x": made, "y": None}


def prepared(part: Part) -> Mapping[str, Any]:
    from polytrain_torch import prepare_data_loader

    return {**loader(part), "x": prepare_data_loader(loader(part)["x"])}


ARGUMENTS = {
    **keras_cases.ARGUMENTS,
    "`x`: torch `DataLoader`": Case(fit=loader),
    "`x`: `prepare_data_loader`": Case(verdict=REFUSED, fit=prepared),
}

OPTIONS: dict[str, Case] = {
    "`clipnorm`": Case(optimizer={"clipnorm": 0.1}),
    "`global_clipnorm`": Case(optimizer={"global_clipnorm": 0.1}),
    "`clipvalue`": Case(optimizer={"clipvalue": 0.01}),
    "`gradient_accumulation_steps`": Case(optimizer={"gradient_accumulation_steps": 2}),
    "`use_ema`": Case(optimizer={"use_ema": True, "ema_momentum": 0.5}),
    "`steps_per_execution`": Case(verdict=REFUSED, compile={"steps_per_execution": 2}),
    "`weighted_metrics`": Case(compile={"weighted_metrics": ["mae"]}),
    "`mixed_bfloat16`": Case(policy="mixed_bfloat16"),
}
"""Rows of what is compiled."""

CASES = {**ARGUMENTS, **OPTIONS, **CALLBACKS}


def train(config: dict[str, Any]) -> None:
    """Fits all cases, prepared on several workers, plain on one."""
    os.environ["KERAS_BACKEND"] = "torch"

    import polytrain
    from polytrain_torch.keras import prepare_model

    context = polytrain.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    found = {}
    for number, name in enumerate(config["names"]):
        if size == 1 and CASES[name].verdict == REFUSED:
            continue
        path = Path(config["path"], f"{size}-{rank}", str(number))
        prepare = {} if size == 1 else {"prepare": prepare_model}
        ended = outcome(CASES[name], Part(rank=rank, size=size, path=path), **prepare)
        found[name] = ended | written(path)
    polytrain.report({"found": found})
