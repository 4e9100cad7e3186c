"""What a rank saves of the last round if another rank is lost."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xgboost

from polytrain.extension import NotCleanError
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.continuing import file_of
from polytrain_xgboost.history import History, Score

Save = Callable[[xgboost.Booster, History, Path], None]

_WEIGHTS = b"weight_drop[#L"
"""What a saved model has before the number of dart's weights, and these."""


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

    _weights: dict[int, Sequence[float]] = field(default_factory=dict)
    """Number of rounds → the weights of their trees then, after the last two rounds."""

    def note(self, model: xgboost.Booster) -> dict[str, Any]:
        """See `RoundState`."""
        history, rounds = self.history, model.num_boosted_rounds()
        if self.scales_old_trees:
            self._weights[rounds] = _weights_of(model)
            self._weights.pop(rounds - 2, None)
        return {
            "rounds": rounds,
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
            weights = self._weights.get(note["rounds"])
            if self.scales_old_trees and weights is None:
                raise NotCleanError("the next round has changed the weights of earlier trees")
            model = _first_rounds(model, note["rounds"], weights)
        if self.has_attributes:
            model.set_attr(**dict.fromkeys(model.attributes()) | note["attributes"])
        history = replace(
            self.history,
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
        params: XGBoost's parameters.
    """
    return (
        params.get("device", "cpu") == "cpu"
        and not options.quantiles_in_leaves
        and not options.needs_all_rounds
    )


def _weights_of(model: xgboost.Booster) -> list[float]:
    """Return dart's weights of a model's trees."""
    saved = bytes(model.save_raw("ubj"))
    begin = saved.rindex(_WEIGHTS) + len(_WEIGHTS)
    (count,) = struct.unpack_from(">Q", saved, begin)
    # Each has its type before it.
    values = struct.iter_unpack(">xf", saved[begin + 8 : begin + 8 + 5 * count])
    return [weight for (weight,) in values]


def _first_rounds(
    model: xgboost.Booster, rounds: int, weights: Sequence[float] | None
) -> xgboost.Booster:
    """Return a copy with the trees of the first rounds; XGBoost's own slice has no categories.

    Args:
        rounds: number of rounds.
        weights: dart's weights of their trees; None with another booster.
    """
    whole = json.loads(model.save_raw("json"))
    booster = whole["learner"]["gradient_booster"]
    if weights is not None:
        booster["weight_drop"] = weights
        booster = booster["gbtree"]
    trees = booster["model"]
    trees["iteration_indptr"] = trees["iteration_indptr"][: rounds + 1]
    count = trees["iteration_indptr"][-1]
    trees["trees"], trees["tree_info"] = trees["trees"][:count], trees["tree_info"][:count]
    trees["gbtree_model_param"]["num_trees"] = str(count)
    return xgboost.Booster(model_file=file_of(whole))
