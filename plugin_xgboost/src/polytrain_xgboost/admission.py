"""What XGBoost takes as labels, weights and features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from polytrain.boosting.admission import admitted
from polytrain.boosting.table_validation import Labels, Rule, finite, required, weights
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.collecting import Ranks


def admitted_tables(
    tables: Mapping[str, pa.Table], options: XGBoost, ranks: Ranks
) -> dict[str, pa.Table]:
    """The tables, if XGBoost can train on them; see `polytrain.boosting.admission`."""
    assert options.label is not None
    schema, besides = tables["train"].schema, options.columns_besides_features
    features = pa.schema([field for field in schema if field.name not in besides])
    return admitted(
        tables,
        features=features.names,
        label=options.label,
        rules=[*_rules(options), *finite(features, "XGBoost")],
        gather=ranks.gathered,
        is_logging_rank=ranks.me == 0,
    )


def labels(params: Mapping[str, Any]) -> Labels | None:
    """What the objective takes; None if that is any number, or for XGBoost to say."""
    objective = str(params.get("objective", "reg:squarederror"))
    if objective in ("binary:logistic", "binary:logitraw", "reg:logistic"):
        return Labels(objective=objective, low=0, high=1)
    if objective == "binary:hinge":
        return Labels(objective=objective, low=0, high=1, whole=True)
    if objective.startswith("multi:"):
        high = int(params["num_class"]) - 1
        return Labels(objective=objective, low=0, high=high, whole=True)
    if objective in ("count:poisson", "reg:tweedie"):
        return Labels(objective=objective, low=0)
    return None


def _rules(options: XGBoost) -> Iterator[Rule]:
    if options.label is not None:
        yield from required("label", options.label)
        taken = labels(options.params) if options.obj is None else None
        if taken is not None:
            yield taken.rule("label", options.label)
    if options.weight is not None:
        yield from weights("weight", options.weight)
    if options.base_margin is not None:
        yield from required("base_margin", options.base_margin)
