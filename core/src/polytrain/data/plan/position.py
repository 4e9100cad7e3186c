"""Where a run stands in a data set: what a checkpoint records of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypedDict, TypeVar

from polytrain.data.plan.marks import differences
from polytrain.data.plan.row_plan import Plan
from polytrain.data.plan.stream_partitioner import Segment
from polytrain.storage.typed_json import Count, Ranks, fitting


class Position(Protocol):
    """A place in an epoch."""

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""

    @property
    def start(self) -> int:
        """Rows that have been given of it."""

    @property
    def is_beginning(self) -> bool:
        """Whether nothing has been given at all."""

    def moved(self: Self, epoch: int, start: int) -> Self:
        """Another place."""

    def to_plain(self) -> dict[str, Any]:
        """The position as JSON and msgpack know it."""


Self = TypeVar("Self", bound=Position)


_FILE = "the position in a data set"
"""Which is in a checkpoint's manifest."""


class _PlainStreamPosition(TypedDict):
    epoch: Count
    legs: list[tuple[Ranks, Count]]
    data: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """A row of an epoch, and the order that makes the two numbers mean something."""

    epoch: Count = 0
    start: Count = 0
    """Rows of the epoch that have been given, over all ranks; with groups, groups."""

    plan: Plan

    data: Mapping[str, str] = field(default_factory=dict)
    """What the data set is known by: see `fingerprint.marks`."""

    @property
    def is_beginning(self) -> bool:
        """Whether nothing has been given at all."""
        return self.epoch == 0 and self.start == 0

    def moved(self, epoch: int, start: int) -> DataPosition:
        """Another place in the same order."""
        # For each batch: `replace` takes twice as long.
        return DataPosition(epoch=epoch, start=start, plan=self.plan, data=self.data)

    def to_plain(self) -> dict[str, Any]:
        """The position as JSON and msgpack know it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DataPosition:
        """What `to_plain` has written.

        Raises:
            DamagedFileError: it is something else.
        """
        return fitting(cls, dict(plain), file=_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """The rows of an epoch that the ranks have been given, where nobody knows the rows' numbers."""

    epoch: int = 0
    legs: tuple[Segment, ...] = ()
    """What was consumed of the epoch before this world began."""

    world_size: int
    start: int = 0
    """Rows that each rank has been given since."""

    data: Mapping[str, str] = field(default_factory=dict)
    """What the data set is known by."""

    @property
    def is_beginning(self) -> bool:
        """Whether nothing has been given at all."""
        return self.epoch == 0 and self.start == 0 and not self.legs

    def moved(self, epoch: int, start: int) -> StreamPosition:
        """Another place; a new epoch has no legs yet."""
        legs = self.legs if epoch == self.epoch else ()
        return replace(self, epoch=epoch, legs=legs, start=start)

    def to_plain(self) -> dict[str, Any]:
        """The position as JSON and msgpack know it."""
        last = [(self.world_size, self.start)] if self.start else []
        return {
            "epoch": self.epoch,
            "legs": [*map(list, self.legs), *map(list, last)],
            "data": dict(self.data),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], world_size: int) -> StreamPosition:
        """Continue from what `to_plain` has written, in a world of this size.

        Raises:
            DamagedFileError: it is something else.
        """
        read = fitting(_PlainStreamPosition, dict(plain), file=_FILE)
        legs = tuple(Segment(*leg) for leg in read["legs"])
        return cls(epoch=read["epoch"], legs=legs, world_size=world_size, data=read["data"])


class DataChangedError(Exception):
    """A data set, or the order in which it is read, is not what a checkpoint was made with."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"

    remedy = (
        "Pass the same data with the same options, or go on from a checkpoint that was made "
        "between two epochs"
    )


def resumed(name: str, position: DataPosition, plan: Plan, data: Mapping[str, str]) -> DataPosition:
    """Where to go on in a data set that is read by this plan now.

    Args:
        name: of the data set.
        position: of the checkpoint.
        plan: how it is read now.
        data: what it is known by now.

    Raises:
        DataChangedError: the position is inside an epoch of another order, or of other data.
    """
    if position.start:
        then, now = asdict(position.plan), asdict(plan)
        changes = [f"{k}={then[k]!r} then, {now[k]!r} now" for k in then if then[k] != now[k]]
        _check_unchanged(name, position, [*changes, *differences(position.data, data)])
    return replace(position, plan=plan, data=data)


def resumed_stream(name: str, position: StreamPosition, data: Mapping[str, str]) -> StreamPosition:
    """The same for a stream.

    Raises:
        DataChangedError: the position is inside an epoch of another pipeline.
    """
    if position.legs:
        _check_unchanged(name, position, differences(position.data, data))
    return replace(position, data=data)


def _check_unchanged(name: str, position: Position, changes: Sequence[str]) -> None:
    if changes:
        rows = f"row {position.start}" if position.start else "some row"
        raise DataChangedError(
            f"The checkpoint was made at {rows} of epoch {position.epoch} of the data set "
            f"{name!r}, which is another one now ({'; '.join(changes)}): nobody can tell which "
            "rows are still to come"
        )
