"""Objectives and metrics of labels and scores, as functions that `lightgbm.train` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import lightgbm


@dataclass(frozen=True, slots=True)
class OfRows:
    """A function of scores and data set for one of labels, scores, weights and queries' sizes."""

    function: Callable[..., Any]
    """It takes the first two of these arguments, or three, or all four."""

    def __post_init__(self) -> None:
        if not 2 <= len(signature(self.function).parameters) <= 4:
            raise TypeError(
                f"{self.function!r} must have 2, 3 or 4 arguments: labels, scores, weights and "
                "the sizes of queries"
            )

    def __call__(self, scores: Any, rows: lightgbm.Dataset) -> Any:
        facts = (rows.get_label(), scores, rows.get_weight(), rows.get_group())
        return self.function(*facts[: len(signature(self.function).parameters)])
