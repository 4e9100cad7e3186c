"""What a rank saves of the last round if another rank is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xgboost

from polytrain.extension import NotCleanError
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.history import History, Score

Save = Callable[[xgboost.Booster, History, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRounds:
    """The `RoundState` of XGBoost."""

    history: History
    save: Save
    """Writes a checkpoint."""

    has_attributes: bool
    """Whether rounds may change the model's attributes."""

    scales_old_trees: bool
    """Whether a round changes the weights of earlier trees, when it ends."""

    def note(self, model: xgboost.Booster) -> dict[str, Any]:
        """See `RoundState`."""
        history = self.history
        return {
            "rounds": model.num_boosted_rounds(),
            "attributes": model.attributes() if self.has_attributes else {},
            "scores": history.rounds[-1],
            "params": dict(history.params),
            "is_over": history.is_over,
            "has_best": history.has_best,
        }

    def rounds(self, model: xgboost.Booster) -> int:
        """See `RoundState`."""
        return model.num_boosted_rounds()

    def write(
        self, model: xgboost.Booster, round_: int, note: Mapping[str, Any], directory: Path
    ) -> None:
        """See `RoundState`."""
        if self.rounds(model) > note["rounds"]:
            if self.scales_old_trees:
                raise NotCleanError("the next round has changed the weights of earlier trees")
            model = _first_rounds(model, note["rounds"])
        if self.has_attributes:
            model.set_attr(**dict.fromkeys(model.attributes()) | note["attributes"])
        history = History(
            rounds=[
                *self.history.rounds[: round_ - 1],
                [Score(*score) for score in note["scores"]],
            ],
            params=note["params"],
            is_over=note["is_over"],
            has_best=note["has_best"],
        )
        self.save(model, history, directory)


def can_keep(options: XGBoost, params: Mapping[str, Any]) -> bool:
    """Return whether a round leaves the earlier trees as they are until it ends, on the CPU.

    Args:
        options: the run's options.
        params: XGBoost's parameters.
    """
    return (
        params.get("device", "cpu") == "cpu"
        and params.get("booster", "gbtree") != "gblinear"
        and params.get("process_type", "default") == "default"
        and not options.quantiles_in_leaves
        and not options.needs_all_rounds
    )


def _first_rounds(model: xgboost.Booster, rounds: int) -> xgboost.Booster:
    """Return a copy with the trees of the first rounds; XGBoost's own slice has no categories."""
    whole = json.loads(model.save_raw("json"))
    trees = whole["learner"]["gradient_booster"]["model"]
    trees["iteration_indptr"] = trees["iteration_indptr"][: rounds + 1]
    count = trees["iteration_indptr"][-1]
    trees["trees"], trees["tree_info"] = trees["trees"][:count], trees["tree_info"][:count]
    trees["gbtree_model_param"]["num_trees"] = str(count)
    return xgboost.Booster(model_file=bytearray(json.dumps(whole).encode()))
