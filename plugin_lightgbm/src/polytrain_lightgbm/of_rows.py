"""Adapts objectives and metrics of LightGBM's estimators to `lightgbm.train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import lightgbm


@dataclass(frozen=True, slots=True)
class OfRows:
    """Lets LightGBM call a function of labels, scores, weights and query sizes."""

    function: Callable[..., Any]
    """Takes the first two, three or all four of these arguments."""

    def __post_init__(self) -> None:
        if not 2 <= len(signature(self.function).parameters) <= 4:
            raise TypeError(
                f"{self.function!r} must have 2, 3 or 4 arguments: labels, scores, weights and "
                "the sizes of queries"
            )

    def __call__(self, scores: Any, rows: lightgbm.Dataset) -> Any:
        facts = (rows.get_label(), scores, rows.get_weight(), rows.get_group())
        return self.function(*facts[: len(signature(self.function).parameters)])
