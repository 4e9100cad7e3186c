"""Positions of a run in its data sets: what checkpoints record, and when they are still valid."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypedDict

from polytrain.data.plan.row_plan import Plan
from polytrain.data.plan.stream_partitioner import Segment
from polytrain.storage.typed_json import Count, Ranks, fitting

ROWS = "number of rows"
COLUMNS = "names or types of columns"
STEPS = "steps of the pipeline"
MIX = "sources, weights or sizes of the mix"
"""Keys of facts about any data set, and of the digests of a pipeline and of a mix."""

NAMES = "names of files"
ORDER = "order of files"
VERSIONS = "sizes or times of files"
ORDER_WITHOUT_NAMES = "sizes and times of files in their order"
VERSIONS_WITHOUT_NAMES = "sizes and times of files"
"""Keys of digests of files: by their names, and of files that may have been renamed."""

CONTENTS = "contents of files"
SAMPLES = "sampled contents of files"
"""Keys of digests of what is in the files, in their order: all of it, or some of it."""

_FILE = "the position in a data set"
"""The part of a checkpoint's manifest that has it, for messages."""


class DataChangedError(Exception):
    """A data set, or the order in which it is read, is not what a checkpoint was made with."""

    remedy = (
        "Pass the same data with the same options, or resume from a checkpoint that was made "
        "between two epochs"
    )

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


@dataclass(slots=True, kw_only=True)
class DataPosition:
    """A position in the order of a plan.

    Nobody changes it. It isn't frozen: one is made for each batch, and that takes twice as long.
    """

    epoch: Count = 0
    start: Count = 0
    """Number of rows of the epoch that have been given, over all ranks; with groups, of groups."""

    plan: Plan

    whole: bool = False
    """Every rank is given all rows: `start` is each rank's own."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """The data set's: see `fingerprint.digests`."""

    @property
    def is_beginning(self) -> bool:
        """Whether no row has been given in any epoch."""
        return self.epoch == 0 and self.start == 0

    def moved(self, epoch: int, start: int) -> DataPosition:
        """Return another position in the same data set."""
        # For each batch: `replace` takes twice as long.
        return DataPosition(
            epoch=epoch, start=start, plan=self.plan, whole=self.whole, digests=self.digests
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the position as values that JSON and msgpack can hold."""
        plain = asdict(self)
        if self.plan.mix is not None:
            plain["plan"]["mix"] = {key: [*each] for key, each in plain["plan"]["mix"].items()}
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DataPosition:
        """Read the values that `to_plain` returns.

        Raises:
            DamagedFileError: `plain` has other values.
        """
        return fitting(cls, dict(plain), file=_FILE)

    @classmethod
    def resume(
        cls,
        name: str,
        saved: Mapping[str, Any] | None,
        plan: Plan,
        digests: Mapping[str, str],
        *,
        whole: bool = False,
    ) -> DataPosition:
        """The position at which a run starts in a data set that it reads by a plan.

        Args:
            name: of the data set.
            saved: the position in the checkpoint's manifest; None without a checkpoint.
            plan: how the data set is read now.
            digests: the data set's now.
            whole: whether every rank is given all rows now.

        Raises:
            DataChangedError: the saved position is inside an epoch of another order, of other data,
                or of a stream.
        """
        if saved is None:
            return cls(plan=plan, whole=whole, digests=digests)
        if "plan" not in saved:
            raise DataChangedError(
                f"The data set {name!r} was a stream when the checkpoint was made, and isn't now"
            )
        position = cls.from_plain(saved)
        if position.start:
            then, now = asdict(position.plan), asdict(plan)
            # The digests of a mix say what differs in it.
            keys = [key for key in then if then[key] != now[key] and key != "mix"]
            changes = [f"{key}={then[key]!r} then, {now[key]!r} now" for key in keys]
            if position.whole != whole:
                words = {True: "whole on each worker", False: "split over the workers"}
                changes.append(f"{words[position.whole]} then, {words[whole]} now")
            _check_unchanged(name, position, [*changes, *differences(position.digests, digests)])
        return replace(position, plan=plan, whole=whole, digests=digests)


class _PlainStreamPosition(TypedDict):
    epoch: Count
    segments: list[tuple[Ranks, Count]]
    digests: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """A position in a stream, whose rows have no numbers."""

    epoch: int = 0
    segments: tuple[Segment, ...] = ()
    """The part of the epoch that was consumed before this world began."""

    world_size: int
    start: int = 0
    """Number of rows that each rank has been given since then."""

    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_beginning(self) -> bool:
        """Whether no row has been given in any epoch."""
        return self.epoch == 0 and self.start == 0 and not self.segments

    def moved(self, epoch: int, start: int) -> StreamPosition:
        """Return another position in the same data set."""
        segments = self.segments if epoch == self.epoch else ()
        return replace(self, epoch=epoch, segments=segments, start=start)

    def to_plain(self) -> dict[str, Any]:
        """Return the position as values that JSON and msgpack can hold."""
        last = [Segment(self.world_size, self.start)] if self.start else []
        segments = [list(segment) for segment in (*self.segments, *last)]
        return {"epoch": self.epoch, "segments": segments, "digests": dict(self.digests)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], world_size: int) -> StreamPosition:
        """Read the values that `to_plain` returns, for a world of this size.

        Raises:
            DamagedFileError: `plain` has other values.
        """
        read = fitting(_PlainStreamPosition, dict(plain), file=_FILE)
        segments = tuple(Segment(*segment) for segment in read["segments"])
        return cls(
            epoch=read["epoch"], segments=segments, world_size=world_size, digests=read["digests"]
        )

    @classmethod
    def resume(
        cls, name: str, saved: Mapping[str, Any] | None, world_size: int, digests: Mapping[str, str]
    ) -> StreamPosition:
        """The position at which a run starts in a stream; see `DataPosition.resume`.

        Raises:
            DataChangedError: the saved position is inside an epoch of another pipeline, or of a
                data set that wasn't a stream.
        """
        if saved is None:
            return cls(world_size=world_size, digests=digests)
        if "segments" not in saved:
            raise DataChangedError(
                f"The data set {name!r} is a stream now, and wasn't when the checkpoint was made"
            )
        position = cls.from_plain(saved, world_size)
        if position.segments:
            _check_unchanged(name, position, differences(position.digests, digests))
        return replace(position, digests=digests)


def _check_unchanged(
    name: str, position: DataPosition | StreamPosition, changes: Sequence[str]
) -> None:
    if changes:
        rows = f"row {position.start}" if position.start else "some row"
        raise DataChangedError(
            f"The checkpoint was made at {rows} of epoch {position.epoch} of the data set "
            f"{name!r}, which is another one now ({'; '.join(changes)}): nobody can tell which "
            "rows are still to come"
        )


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return how two data sets differ; nothing if the rows are the same, as far as this tells.

    Files whose content is the same may have other names and times.

    Args:
        then: the digests of one; see `fingerprint.digests`. With `fingerprint.facts` these count
            as well.
        now: the digests of the other.
    """
    kinds = _kind(then), _kind(now)
    if kinds[0] != kinds[1]:
        # They have no digest in common.
        return [f"{kinds[0]} then, {kinds[1]} now"]
    (then, sources_then), (now, sources_now) = _by_source(then), _by_source(now)
    found = [
        f"{change} in the source {source}"
        for source in sources_then
        if source in sources_now
        for change in differences(sources_then[source], sources_now[source])
    ]
    changed = [what for what in then if what in now and then[what] != now[what]]
    facts = [f"{ROWS} {then[ROWS]} then, {now[ROWS]} now"] if ROWS in changed else []
    facts += [f"other {COLUMNS}"] if COLUMNS in changed else []
    facts += [f"other {what}" for what in _other_digests(changed, then.keys() & now.keys())]
    return facts + found


def of_source(name: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of a mix's source as some of the mix's."""
    return {f"{name!r}: {what}": digest for what, digest in digests.items()}


def _by_source(digests: Mapping[str, str]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return a data set's own digests, and those of each source; see `of_source`."""
    own: dict[str, str] = {}
    sources: dict[str, dict[str, str]] = {}
    for key, digest in digests.items():
        if (found := _SOURCE.fullmatch(key)) is None:
            own[key] = digest
        else:
            sources.setdefault(found[1], {})[found[2]] = digest
    return own, sources


_SOURCE = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"): (.*)""", re.DOTALL)
"""A source's name, quoted as Python does, and the key of a digest."""


def _other_digests(changed: Sequence[str], known: Collection[str]) -> list[str]:
    """Return those changed digests that say what is another, each once."""
    if CONTENTS in known and CONTENTS not in changed:
        return []
    if SAMPLES in known and SAMPLES not in changed and ORDER_WITHOUT_NAMES not in changed:
        return []
    if NAMES in changed:
        # All other digests contain the names.
        if VERSIONS_WITHOUT_NAMES in changed:
            return ["files"]
        return [NAMES, ORDER] if ORDER_WITHOUT_NAMES in changed else [NAMES]
    found = [what for what in changed if what not in (*_FACTS, *_NAMELESS, *_INSIDE)]
    return found or [what for what in changed if what in _INSIDE]


_FACTS = (ROWS, COLUMNS)
_NAMELESS = (ORDER_WITHOUT_NAMES, VERSIONS_WITHOUT_NAMES)
_INSIDE = (CONTENTS, SAMPLES)


def _kind(digests: Mapping[str, str]) -> str:
    if STEPS in digests:
        return "a pipeline"
    if MIX in digests:
        return "a mix"
    if NAMES in digests:
        return "files"
    others = [what for what in digests if what not in _FACTS]
    return "a table" if others else "items or computed blocks"
