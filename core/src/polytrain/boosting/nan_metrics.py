"""Warns of a metric that is NaN, once in a run's attempt."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class NanWarning:
    """Looks at the metrics of each round until one is NaN."""

    def __init__(self, *, is_logging_rank: bool) -> None:
        self._is_over = not is_logging_rank

    def after_round(self, round_: int, metrics: Mapping[str, float]) -> None:
        """Log a warning if a metric is NaN for the first time.

        Args:
            round_: counts from 1.
            metrics: the round's metrics by name.
        """
        names = [repr(name) for name, value in metrics.items() if math.isnan(value)]
        if names and not self._is_over:
            self._is_over = True
            logger.warning(
                "NaN in round %d: %s. Early stopping and the choice of the best checkpoint can't "
                "use it. Look at the predictions and at the labels and weights of that data set, "
                "or choose another metric.",
                round_,
                ", ".join(names),
            )
