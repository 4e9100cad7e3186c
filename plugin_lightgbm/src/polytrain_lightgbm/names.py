"""The names of features that LightGBM accepts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from polytrain_plugins import Job, Problem

if TYPE_CHECKING:
    import pyarrow as pa

FORBIDDEN = '",:[]{}\n\t'
"""LightGBM writes names into text, and into JSON, as they are."""


def as_lightgbm_has_it(name: str) -> str:
    """A feature's name in a model: in its text, names stand between spaces."""
    return name.replace(" ", "_")


def renamed(table: pa.Table) -> pa.Table:
    """The table with its columns called as in a model."""
    return table.rename_columns([as_lightgbm_has_it(name) for name in table.column_names])


def name_problems(job: Job, others: Collection[str]) -> Iterator[Problem]:
    """Columns that LightGBM can't tell apart, and features without a name.

    Args:
        job: whose data set "train" is looked at.
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
