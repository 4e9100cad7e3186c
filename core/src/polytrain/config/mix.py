"""Several sources that a run trains on as one data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Mix:
    """Sources mixed by weight: `datasets={"train": Mix({"code": a, "web": b}, weights={…})}`.

    After any number of rows of an epoch, each source has had its share of them, rounded down or up.
    The row at a position follows from the data, the weights, `seed` and the epoch alone, so it is
    the same on any number of workers, and after a restart or a change of size in mid-epoch.

    A source that is exhausted begins again, in a new order if `shuffle` is set. In the next epoch
    it continues where it was: none of its rows comes again before all others have come.
    """

    sources: Mapping[str, Any] = field(repr=False)
    """Data sets by name, each as `datasets` takes them; a Ray data set materialized. All have the
    same columns, once `columns` and `transform` of the `DataConfig` are applied."""

    weights: Mapping[str, float] = field(kw_only=True)
    """The share of each source, above 0; only their ratio matters. Decimals are exact as long as
    the sum of the smallest whole numbers in that ratio is at most 65,536; otherwise shares are
    rounded to about 1 / 65,536."""

    epoch: int | Literal["first_exhausted", "all_exhausted"] = field(
        default="first_exhausted", kw_only=True
    )
    """The length of an epoch: a number of rows; or until the first source is exhausted and would
    begin again, so that no row comes twice; or until every source has been exhausted."""
