"""Loads a model to continue, and checks that it matches the run and the data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import xgboost

from polytrain_xgboost.parameters import number_of_outputs


def trees_of(given: Any) -> xgboost.Booster | None:
    """Return the user's model to continue; None without one.

    A booster is reloaded as from a file, without its training parameters, which a restart would
    lose. Its best round is removed: with it, predictions would leave out the new trees.

    Args:
        given: the option `xgb_model`.
    """
    if given is None:
        return None
    is_path = isinstance(given, str | os.PathLike)
    model = xgboost.Booster(model_file=given if is_path else given.save_raw())
    forget_best_round(model)
    return model


def file_of(model: Mapping[str, Any]) -> bytearray:
    """Return a model's parsed JSON as a file that XGBoost loads.

    It doesn't know JSON's escapes of letters, as in features' names.
    """
    return bytearray(json.dumps(model, ensure_ascii=False).encode())


def forget_best_round(model: xgboost.Booster) -> None:
    """Remove early stopping's attributes from a model."""
    model.set_attr(best_iteration=None, best_score=None)


def check_booster(model: xgboost.Booster, params: Mapping[str, Any]) -> None:
    """Check that the model has the run's `booster`, and as many scores for each row.

    Otherwise XGBoost would drop its trees, or take one class's trees for another's.

    Raises:
        ValueError: the model has another booster, or another number of scores.
    """
    learner = json.loads(model.save_config())["learner"]
    theirs = learner["learner_train_param"]["booster"]
    asked = params.get("booster", "gbtree")
    if theirs != asked:
        raise ValueError(
            f"The model to continue was trained with booster={theirs!r}, and this run has "
            f"{asked!r}: XGBoost would begin without the model's trees. "
            f"Set params={{'booster': {theirs!r}, …}}."
        )
    outputs = learner["learner_model_param"]
    have = max(1, int(outputs["num_class"]), int(outputs["num_target"]))
    want = number_of_outputs(params)
    if have != want:
        raise ValueError(
            f"The model to continue gives {have} score(s) for each row, and this run {want}: one "
            "for each class or quantile. Set the objective, 'num_class' and 'quantile_alpha' as "
            "the model was trained."
        )


def with_those_of(
    model: xgboost.Booster, categories: Mapping[str, pa.Array], names: Sequence[str]
) -> dict[str, pa.Array]:
    """Return the model's categories by column: its trees refer to categories by number.

    Args:
        model: the model to resume from.
        categories: the data's categories, by column.
        names: the names of the data's features.

    Raises:
        ValueError: the model has other features, or doesn't know all categories.
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
            f"The model to continue has categories in {_listed(known)}; the data has categories in "
            f"{_listed(categories)}. Set categorical=[…] as the model was trained."
        )
    for name, values in categories.items():
        new = sorted(set(values.to_pylist()) - set(known[name].to_pylist()))
        if new:
            raise ValueError(
                f"The model to continue doesn't know {_listed(map(repr, new))} in the column "
                f"{name!r}, and XGBoost can't add categories to a model. Replace them by known "
                "categories, or by missing values."
            )
    return {name: pa.array(values.to_pylist()) for name, values in known.items()}


def _listed(names: Any) -> str:
    return ", ".join(names) or "no column"
