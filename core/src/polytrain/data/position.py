"""Where a run stands in a data set: what a checkpoint records of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from polytrain.data.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """A row of an epoch, and the order that makes the two numbers mean something."""

    epoch: int = 0
    position: int = 0
    """Rows of the epoch that have been given, over all ranks; with groups, groups."""

    plan: Plan

    def to_plain(self) -> dict[str, Any]:
        """The position as JSON and msgpack know it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DataPosition:
        """What `to_plain` has written."""
        return cls(**{**plain, "plan": Plan(**plain["plan"])})


class DataChangedError(Exception):
    """A data set, or the order in which it is read, is not what a checkpoint was made with."""


def resumed(name: str, position: DataPosition, plan: Plan) -> DataPosition:
    """Where to go on in a data set that is read by this plan now.

    The canonical shards are those of the position: they are cut once.

    Raises:
        DataChangedError: the position is inside an epoch of another order.
    """
    plan = replace(plan, shards=position.plan.shards)
    if position.position == 0 or plan == position.plan:
        return replace(position, plan=plan)
    then, now = asdict(position.plan), asdict(plan)
    changes = [
        f"{key}={then[key]!r} then, {now[key]!r} now" for key in then if then[key] != now[key]
    ]
    raise DataChangedError(
        f"The checkpoint was made at row {position.position} of epoch {position.epoch} of the data "
        f"set {name!r}, which is another one now ({'; '.join(changes)}): nobody can tell which "
        "rows are still to come. Pass the same data with the same options, or go on from a "
        "checkpoint that was made between two epochs."
    )
