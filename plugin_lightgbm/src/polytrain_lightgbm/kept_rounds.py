"""What a rank saves of the last round if another rank is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightgbm
from lightgbm.basic import EvalResult

from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.history import History

Save = Callable[[lightgbm.Booster, int, History, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRounds:
    """The `RoundState` of LightGBM."""

    history: History
    save: Save
    """Writes a checkpoint of the model's first iterations."""

    def note(self, model: lightgbm.Booster) -> dict[str, Any]:
        """See `RoundState`."""
        return {
            "rounds": self.rounds(model),
            "evaluations": [list(result) for result in self.history.rounds[-1]],
            "params": dict(self.history.params),
            "best_iteration": self.history.best_iteration,
            "is_over": self.history.is_over,
        }

    def rounds(self, model: lightgbm.Booster) -> int:
        """See `RoundState`."""
        return model.current_iteration()

    def write(
        self, model: lightgbm.Booster, round_: int, note: Mapping[str, Any], directory: Path
    ) -> None:
        """See `RoundState`."""
        history = replace(
            self.history,
            rounds=[
                *self.history.rounds[: round_ - 1],
                [EvalResult(*result) for result in note["evaluations"]],
            ],
            params=note["params"],
            best_iteration=note["best_iteration"],
            is_over=note["is_over"],
        )
        self.save(model, note["rounds"], history, directory)


def can_keep(options: LightGBM) -> bool:
    """Return whether a round leaves the earlier trees as they are until it ends."""
    return not options.renews_leaves and not options.needs_all_rounds
