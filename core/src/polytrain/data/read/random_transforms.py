"""Functions that change rows at random: batch by batch, in each epoch, the same after a restart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from polytrain.data.read.pieces import Pieces
from polytrain.data.read.transforms import Batch, applied, tried, typed
from polytrain.data.types.columns import empty_table

RandomFunction: TypeAlias = Callable[..., Mapping[str, Any]]

_WORD = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTransform:
    """A function of a batch and a random generator."""

    function: RandomFunction
    schema: pa.Schema
    """The columns that the function returns."""

    name: str
    """The data set's, for messages."""

    def of(self, rows: pa.Table, where: str, *key: int) -> pa.Table:
        """Apply the function to some rows.

        Args:
            rows: as they were read.
            where: which these are, for messages.
            key: numbers that say what is drawn: the same draw the same.

        Raises:
            TransformError: the function failed, or returned other columns or types than before.
        """
        if not rows.num_rows:
            # Functions of users may well not expect that.
            return empty_table(self.schema)
        where = f"{where} of {self.name!r}"
        return typed(applied(_drawing(self.function, *key), rows, where), self.schema, where)


def wants_generator(function: Any) -> bool:
    """Whether a function has a parameter `rng` that nobody has filled."""
    try:
        parameter = inspect.signature(function).parameters.get("rng")
    except (TypeError, ValueError):
        return False
    return parameter is not None and (
        parameter.default is parameter.empty or parameter.default is None
    )


def random_transform(name: str, found: Pieces, function: RandomFunction) -> RandomTransform:
    """A function as it is applied to batches; tries it out on the first few rows.

    Raises:
        SourceError: the function fails, or returns no dict of arrays.
    """
    schema = tried(name, found, _drawing(function, 0))
    return RandomTransform(function=function, schema=schema, name=name)


def _drawing(function: RandomFunction, *key: int) -> Callable[[Batch], Mapping[str, Any]]:
    generator = np.random.default_rng([number % _WORD for number in key])
    return partial(function, rng=generator)
