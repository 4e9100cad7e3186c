"""Which metrics of a boosting round are reported, and under which names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedMetrics:
    """The choice of a training function, with the arguments of Ray Train's report callbacks."""

    metrics: str | Sequence[str] | Mapping[str, str] | None = None
    """Names such as "valid-logloss", or reported names to such names; all metrics by default."""

    results_postprocessing_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    """Applied to the chosen metrics; what it returns is reported."""

    def of(self, measured: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is reported of a round's metrics.

        Raises:
            KeyError: a chosen metric isn't measured.
        """
        chosen = [self.metrics] if isinstance(self.metrics, str) else self.metrics
        names = chosen if isinstance(chosen, Mapping) else {name: name for name in chosen or ()}
        for name in names.values():
            if name not in measured:
                known = ", ".join(map(repr, measured)) or "none"
                raise KeyError(f"metrics: no metric is named {name!r}. There are: {known}.")
        reported = {new: measured[name] for new, name in names.items()} or dict(measured)
        function = self.results_postprocessing_fn
        return reported if function is None else function(reported)
