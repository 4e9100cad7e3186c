"""Rules for feature names in LightGBM."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from polytrain_plugins import Job, Problem

if TYPE_CHECKING:
    import pyarrow as pa

FORBIDDEN = '",:[]{}\n\t'
"""Characters that break LightGBM's text and JSON, where it doesn't escape names."""


def as_lightgbm_has_it(name: str) -> str:
    """Return a feature's name as in a model, whose text separates names by spaces."""
    return name.replace(" ", "_")


def renamed(table: pa.Table) -> pa.Table:
    """Return the table with its columns named as in a model."""
    return table.rename_columns([as_lightgbm_has_it(name) for name in table.column_names])


def name_problems(job: Job, others: Collection[str]) -> Iterator[Problem]:
    """Yield columns whose names are the same to LightGBM, and features without a name.

    Args:
        job: the job whose data set "train" is checked.
        others: columns that aren't features.
    """
    columns = job.datasets["train"].columns if "train" in job.datasets else ()
    found: dict[str, str] = {}
    for name in columns:
        known = as_lightgbm_has_it(name)
        if known in found:
            yield Problem(
                field="datasets['train']",
                what=f"the columns {found[known]!r} and {name!r} are the same to LightGBM",
                remedy="Rename one of them in all data sets",
            )
        if not name and name not in others:
            yield Problem(
                field="datasets['train']", what="a feature has no name", remedy="Give it one"
            )
        found[known] = name
