"""Reports boosting rounds, except those that a restart repeats; warns of NaN metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from polytrain_plugins import Session

logger = logging.getLogger(__name__)


class RoundReports:
    """Reports the rounds of an attempt to its session."""

    def __init__(self, session: Session, *, reported: int) -> None:
        """
        Args:
            session: the attempt's session.
            reported: number of rounds reported before the restart. Some models repeat them.
        """
        self._session = session
        self._reported = reported
        self._has_warned = session.world.me.rank > 0

    def __call__(self, round_: int, metrics: Mapping[str, float], model: Any) -> None:
        """Report a round, and log a warning if a metric is NaN for the first time.

        Args:
            round_: the round's number, from 1.
            metrics: the round's metrics by name.
            model: the model after the round.
        """
        names = [repr(name) for name, value in metrics.items() if math.isnan(value)]
        if names and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "NaN in round %d: %s. Early stopping and the choice of the best checkpoint can't "
                "use it. Look at the predictions and at the labels and weights of that data set, "
                "or choose another metric.",
                round_,
                ", ".join(names),
            )
        if round_ > self._reported:
            self._session.report(step=round_, metrics=metrics, model=model)
