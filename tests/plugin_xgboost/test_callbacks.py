"""Parameters that callbacks set before the first round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xgboost

from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.boosting import Boosting
from polytrain_xgboost.collective import Ranks
from polytrain_xgboost.history import History

ROUNDS = 6


class Sets(xgboost.callback.TrainingCallback):  # type: ignore[misc]  # it is Any here
    """Sets a parameter before the first round, and perhaps others in a later round."""

    def __init__(self, first: dict[str, Any], later: dict[str, Any]) -> None:
        self._first, self._later = first, later

    def before_training(self, model: Any) -> Any:
        model.set_param(self._first)
        return model

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if epoch == 2:
            model.set_param(self._later)
        return False


@pytest.mark.parametrize("later", [None, 0.9])
@pytest.mark.parametrize("name", ["subsample", "colsample_bynode"])
def test_a_rate_set_before_training_is_one_of_params(name: str, later: float | None) -> None:
    """After a restart too, unless a later round has set another."""
    in_later_rounds = {} if later is None else {name: later}
    expected, _ = boosted({name: 0.5}, Sets({}, in_later_rounds))
    sets = Sets({name: 0.5}, in_later_rounds)
    assert boosted({}, sets)[0] == expected
    first, history = boosted({}, sets, rounds=3)
    assert boosted({}, sets, model=first, history=history)[0] == expected


def boosted(
    params: dict[str, Any],
    callback: Any,
    *,
    rounds: int = ROUNDS,
    model: bytes | None = None,
    history: str | None = None,
) -> tuple[bytes, str]:
    """Return the model and the run's history after these rounds."""
    options = XGBoost(label="y", params=params, num_boost_round=rounds, callbacks=[callback])
    boosting = Boosting(
        options=options,
        params={"tree_method": "hist", "nthread": 1, **options.booster_params},
        ranks=Ranks(),
        outside=lambda call, *args, **kwargs: call(*args, **kwargs),
        history=History() if history is None else History.from_json(history),
    )
    start = None if model is None else xgboost.Booster(model_file=bytearray(model))
    ended = boosting.train({"train": TABLE}, start, lambda *_: None)
    return bytes(ended.save_raw()), boosting.history.to_json()


_X = np.random.default_rng(0).normal(size=(300, 4))
TABLE = pa.table({**{f"x{i}": _X[:, i] for i in range(4)}, "y": _X[:, 0] + _X[:, 1] * _X[:, 2]})
