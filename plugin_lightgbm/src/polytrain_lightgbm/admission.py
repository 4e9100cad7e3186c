"""What LightGBM takes as labels, weights and features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from polytrain.boosting.admission import admitted
from polytrain.boosting.table_validation import Labels, Rule, required, weights
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.objectives import MULTICLASS, RANKING, objective_of
from polytrain_lightgbm.parameters import value
from polytrain_lightgbm.relay import Star


def admitted_tables(
    tables: Mapping[str, pa.Table], features: Sequence[str], options: LightGBM, star: Star
) -> dict[str, pa.Table]:
    """The tables, if LightGBM can train on them; see `polytrain.boosting.admission`."""
    assert options.label is not None
    return admitted(
        tables,
        features=features,
        label=options.label,
        rules=[*_rules(options)],
        gather=star.gathered,
        is_logging_rank=star.rank == 0,
    )


def labels(params: Mapping[str, Any]) -> Labels | None:
    """What the objective takes; None if that is any number, or for LightGBM to say."""
    objective = objective_of(params)
    if objective == "binary":
        return Labels(objective=objective, low=0, high=1, whole=True)
    if objective in MULTICLASS:
        high = int(value(params, "num_class")) - 1
        return Labels(objective=objective, low=0, high=high, whole=True)
    if objective in ("cross_entropy", "cross_entropy_lambda"):
        return Labels(objective=objective, low=0, high=1)
    if objective in ("poisson", "tweedie"):
        return Labels(objective=objective, low=0)
    if objective in RANKING:
        return Labels(objective=objective, low=0, whole=True)
    return None


def _rules(options: LightGBM) -> Iterator[Rule]:
    if options.label is not None:
        yield from required("label", options.label)
        taken = labels(options.params)
        if taken is not None:
            yield taken.rule("label", options.label)
    if options.weight is not None:
        yield from weights("weight", options.weight)
    if options.init_score is not None:
        yield from required("init_score", options.init_score)
