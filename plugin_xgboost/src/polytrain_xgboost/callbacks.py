"""Calls the user's callbacks when XGBoost would, and lets all ranks stop together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import xgboost
from xgboost.callback import TrainingCallback

from polytrain_xgboost.collective import Ranks
from polytrain_xgboost.history import History, Score, add_to


class TunableBooster(xgboost.Booster):
    """A booster that records parameters that callbacks set, since a saved model lacks them."""

    notes: dict[str, str] | None = None

    def set_param(self, params: Any, value: Any = None) -> None:
        if isinstance(params, str):
            params = [(params, value)]
        pairs = [*(params.items() if isinstance(params, Mapping) else params)]
        # XGBoost would draw rows itself, by their numbers on the rank.
        super().set_param([(name, each) for name, each in pairs if name != "subsample"])
        if self.notes is not None:
            self.notes.update({name: str(each) for name, each in pairs})


class Callbacks:
    """Calls callbacks by XGBoost's rules. Ranks stop together, and runs can be resumed."""

    def __init__(
        self, callbacks: Iterable[TrainingCallback], *, history: History, ranks: Ranks
    ) -> None:
        """
        Args:
            callbacks: the user's callbacks.
            history: the run's history, which records what callbacks do.
            ranks: all ranks; each calls its callbacks.
        """
        self._callbacks = list(dict.fromkeys(callbacks))
        self._history = history
        self._ranks = ranks
        self._log = history.evals_log()
        self._first_params: dict[str, str] = {}

    def before_training(self, booster: xgboost.Booster) -> xgboost.Booster:
        """Call once in every attempt. Return the booster to train."""
        with _noting(booster, self._first_params):
            for callback in self._callbacks:
                booster = callback.before_training(booster)
        # Last, so that parameters from before a restart replace those set by `before_training`.
        booster.set_param(self._history.params)
        return booster

    @property
    def params(self) -> dict[str, str]:
        """The parameters that callbacks have set."""
        return {**self._first_params, **self._history.params}

    def before_iteration(self, booster: xgboost.Booster, epoch: int) -> bool:
        """Call before a round. Return whether training ends."""
        return self._is_over(booster, "before_iteration", epoch)

    def after_iteration(self, booster: xgboost.Booster, epoch: int, scores: list[Score]) -> bool:
        """Call after a round with these metrics. Return whether training ends."""
        add_to(self._log, scores)
        return self._is_over(booster, "after_iteration", epoch)

    def after_training(self, booster: xgboost.Booster) -> xgboost.Booster:
        """Call once, after the last round. Return the model."""
        for callback in self._callbacks:
            booster = callback.after_training(booster)
        return booster

    def _is_over(self, booster: xgboost.Booster, moment: str, epoch: int) -> bool:
        if not self._callbacks:
            return False
        with _noting(booster, self._history.params):
            flag = any(getattr(each, moment)(booster, epoch, self._log) for each in self._callbacks)
        # XGBoost applies new parameters in a collective operation, and only rank 0 saves models.
        booster.save_config()
        over = self._ranks.any(bool(flag))
        self._history.is_over = over
        return over


@contextmanager
def _noting(booster: xgboost.Booster, notes: dict[str, str]) -> Iterator[None]:
    booster.notes = notes
    yield
    booster.notes = None
