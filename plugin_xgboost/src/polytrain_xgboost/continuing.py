"""A model to resume from: its trees, and what they demand of the data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import xgboost


def trees_of(given: Any) -> xgboost.Booster | None:
    """What the user has given to resume from; None if nothing.

    Of a booster its trees alone, as its file has them: parameters that it was trained with are not
    known any more after a restart.

    Args:
        given: the option `xgb_model`.
    """
    if given is None:
        return None
    if isinstance(given, str | os.PathLike):
        return xgboost.Booster(model_file=given)
    return xgboost.Booster(model_file=given.save_raw())


def with_those_of(
    model: xgboost.Booster, categories: Mapping[str, pa.Array], names: Sequence[str]
) -> dict[str, pa.Array]:
    """The model's lists of categories instead of the data's: its trees tell them by their numbers.

    Args:
        model: to resume from.
        categories: of the data, by column.
        names: of the data's features.

    Raises:
        ValueError: the model is of other features, or doesn't know all categories.
    """
    theirs = model.feature_names or []
    if theirs != list(names):
        raise ValueError(
            f"The model to continue has the features {', '.join(theirs) or 'without names'}; "
            f"those of the data are {', '.join(names)}. Give it the columns that the model was "
            "trained on."
        )
    known = {
        name: values
        for name, values in model.get_categories(export_to_arrow=True).to_arrow()
        if values is not None
    }
    if known.keys() != categories.keys():
        raise ValueError(
            f"The model to go on from has categories in {_listed(known)}; the data has some in "
            f"{_listed(categories)}. Set categorical=[…] as it was."
        )
    for name, values in categories.items():
        new = sorted(set(values.to_pylist()) - set(known[name].to_pylist()))
        if new:
            raise ValueError(
                f"The model to go on from has never seen {_listed(map(repr, new))} in the column "
                f"{name!r}, and XGBoost takes no more categories than those that a model began "
                "with. Replace them by one that it knows, or by missing values."
            )
    return {name: pa.array(values.to_pylist()) for name, values in known.items()}


def _listed(names: Any) -> str:
    return ", ".join(names) or "no column"
