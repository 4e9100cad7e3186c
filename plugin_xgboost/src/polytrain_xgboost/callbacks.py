"""The user's callbacks: when XGBoost would call them, and what they decide on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import xgboost
from xgboost.callback import TrainingCallback

from polytrain_xgboost.collecting import Ranks
from polytrain_xgboost.history import History, Score, add_to


class TunableBooster(xgboost.Booster):
    """A booster that notes which parameters callbacks set: they aren't in the model."""

    notes: dict[str, str] | None = None

    def set_param(self, params: Any, value: Any = None) -> None:
        super().set_param(params, value)
        if self.notes is not None:
            told = {params: value} if isinstance(params, str) else dict(params)
            self.notes.update({name: str(each) for name, each in told.items()})


class Callbacks:
    """XGBoost's rules, but that ranks stop together, and that a run may have begun before."""

    def __init__(
        self, callbacks: Iterable[TrainingCallback], *, history: History, ranks: Ranks
    ) -> None:
        """
        Args:
            callbacks: the user's.
            history: of the run; what they do is noted there.
            ranks: all of which call them.
        """
        self._callbacks = list(dict.fromkeys(callbacks))
        self._history = history
        self._ranks = ranks
        self._log = history.evals_log()

    def before_training(self, booster: xgboost.Booster) -> xgboost.Booster:
        """Called once in every attempt. The booster that is trained."""
        for callback in self._callbacks:
            booster = callback.before_training(booster)
        # As they were before a restart: those of the last round were set after those of the first.
        booster.set_param(self._history.params)
        return booster

    def before_iteration(self, booster: xgboost.Booster, epoch: int) -> bool:
        """Whether training ends before a round."""
        return self._is_over(booster, "before_iteration", epoch)

    def after_iteration(self, booster: xgboost.Booster, epoch: int, scores: list[Score]) -> bool:
        """Whether training ends after a round with these metrics."""
        add_to(self._log, scores)
        return self._is_over(booster, "after_iteration", epoch)

    def after_training(self, booster: xgboost.Booster) -> xgboost.Booster:
        """Called once, after the last round. The model."""
        for callback in self._callbacks:
            booster = callback.after_training(booster)
        return booster

    def _is_over(self, booster: xgboost.Booster, moment: str, epoch: int) -> bool:
        if not self._callbacks:
            return False
        with _noting(booster, self._history.params):
            flag = any(getattr(each, moment)(booster, epoch, self._log) for each in self._callbacks)
        # What they have set takes effect by a collective operation, and only rank 0 saves.
        booster.save_config()
        over = self._ranks.any(bool(flag))
        self._history.is_over = over
        return over


@contextmanager
def _noting(booster: xgboost.Booster, notes: dict[str, str]) -> Iterator[None]:
    booster.notes = notes
    yield
    booster.notes = None
