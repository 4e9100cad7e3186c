"""Checks the options of `Result.predict`, without importing TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polytrain_plugins import DatasetInfo, Problem, column_remedy, unknown_name

OPTIONS = ("features", "collate_fn", "custom_objects")


def prediction_problems(options: Mapping[str, Any], data: DatasetInfo) -> Iterator[Problem]:
    """Yield the problems of the options.

    - `features`: the model's input columns, like the backend's option of this name; by default the
      columns that it was trained on, or all columns except label and weight.
    - `collate_fn`: makes the model's input from a dict of column name to NumPy array instead.
    - `custom_objects`: classes and functions that Keras doesn't know, by name.

    Args:
        options: the options that the user passed.
        data: the rows to predict.
    """
    for name in options:
        yield from unknown_name(name, name, OPTIONS, "the options of predict with tensorflow")
    features, collate_fn = options.get("features"), options.get("collate_fn")
    if collate_fn is not None and not callable(collate_fn):
        yield Problem(
            field="collate_fn", what=f"{collate_fn!r} isn't a function", remedy="Pass a function"
        )
    if features is not None and collate_fn is not None:
        yield Problem(
            field="features",
            what="it can't be used with collate_fn, which makes the model's input",
            remedy="Leave one of the two out",
        )
    for name in [features] if isinstance(features, str) else features or ():
        if data.lacks(name):
            yield Problem(
                field="features",
                what=f"the data has no column {name!r}",
                remedy=column_remedy(name, data.columns),
            )
