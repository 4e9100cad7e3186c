"""A stand-in for your library: a linear model, fitted by gradient descent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class LinearModel:
    """A model after some rounds."""

    columns: tuple[str, ...]
    weights: tuple[float, ...]
    """One of each column, and the intercept."""

    rounds: int
    """Gradient steps that it has made."""

    @classmethod
    def untrained(cls, columns: Sequence[str]) -> LinearModel:
        """Return a model of zeros."""
        return cls(columns=tuple(columns), weights=(0.0,) * (len(columns) + 1), rounds=0)

    def predicted(self, features: Numbers) -> Numbers:
        """Predict rows, each by itself: a matrix product may depend on how many there are."""
        found: Numbers = (features * self.weights[:-1]).sum(axis=1) + self.weights[-1]
        return found

    def sums(self, features: Numbers, labels: Numbers) -> Numbers:
        """Return what a step needs, summed over rows: gradient, squared errors, their number."""
        errors = self.predicted(features) - labels
        gradient = [*(features * errors[:, None]).sum(axis=0), errors.sum()]
        return np.array([*gradient, (errors**2).sum(), len(labels)])

    def stepped(self, sums: Numbers, learning_rate: float) -> LinearModel:
        """Return the model after a gradient step.

        Args:
            sums: those of all ranks.
            learning_rate: how far it goes.
        """
        *gradient, _, rows = sums.tolist()
        weights = (
            weight - learning_rate * slope / rows
            for weight, slope in zip(self.weights, gradient, strict=True)
        )
        return replace(self, weights=tuple(weights), rounds=self.rounds + 1)

    def mean_squared_error(self, sums: Numbers) -> float:
        """Return the error before the step."""
        *_, squared, rows = sums.tolist()
        return float(squared / rows)

    def to_json(self) -> str:
        """Return the model as text, which `from_json` reads."""
        return json.dumps({"columns": self.columns, "weights": self.weights, "rounds": self.rounds})

    @classmethod
    def from_json(cls, text: str) -> LinearModel:
        """Return the model that was written by `to_json`."""
        saved = json.loads(text)
        return cls(
            columns=tuple(saved["columns"]),
            weights=tuple(saved["weights"]),
            rounds=saved["rounds"],
        )
