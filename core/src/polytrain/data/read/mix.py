"""Describes a mix of data sets as one, whose rows are those of its sources one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pyarrow as pa

from polytrain.config.configs import DataConfig
from polytrain.config.mix import Mix
from polytrain.data.plan.mixture import Mixture, parts_of
from polytrain.data.read.describe import Mixed, Source, describe, info_of
from polytrain.data.read.file_pieces import FilePiece
from polytrain.data.read.pieces import Piece, Pieces, WrappedPiece
from polytrain.data.read.selection import agreed_schema, subschema
from polytrain.data.read.transforms import random_transform, wants_generator
from polytrain.data.types.schemas import conformed
from polytrain.data_errors import SourceError
from polytrain.text.described import is_whole
from polytrain_plugins import Problem
from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.type_names import a_type, quoted

_ENDS = ("first_exhausted", "all_exhausted")


@dataclass(frozen=True, slots=True)
class ConformedPiece(WrappedPiece):
    """A piece of a source, in the types of the mix."""

    piece: Piece
    schema: pa.Schema

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        return self._of(self.piece.read(start, stop, columns), columns)

    def take(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        return self._of(self.piece.take(rows, columns), columns)

    def scan(
        self, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        for table in self.piece.scan(start, stop, columns):
            yield self._of(table, columns)

    @property
    def reads_into_own_memory(self) -> bool:
        return self.piece.reads_into_own_memory

    def _of(self, table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
        schema = self.schema if columns is None else subschema(self.schema, list(columns))
        return conformed(table, schema, self.where)


def describe_mix(name: str, mix: Mix, config: DataConfig) -> tuple[Source | None, list[Problem]]:
    """Describe a mix, and find problems with it."""
    field = f"datasets[{name!r}]"
    problems = [*_problems(name, field, mix), *_option_problems(name, config)]
    known: dict[str, Source] = {}
    given: Any = mix.sources
    for source, data in given.items() if isinstance(given, Mapping) else ():
        try:
            known[source] = _described(source, data, config)
        except SourceError as error:
            problems.append(
                Problem(field=f"{field}.sources[{source!r}]", what=error.what, remedy=error.remedy)
            )
    if problems:
        return None, problems
    try:
        return _joined(name, mix, known, config.transform), []
    except SourceError as error:
        return None, [Problem(field=field, what=error.what, remedy=error.remedy)]


def _described(name: str, data: Any, config: DataConfig) -> Source:
    """Describe a source.

    Raises:
        SourceError: it can't be read, or not in a mix.
    """
    transform = config.transform
    if transform is not None and wants_generator(transform):
        # It is applied to batches of the mix.
        transform = None
    source = describe(name, data, columns=config.columns, transform=transform, pack=config.pack)
    if source.stream is not None:
        raise SourceError(
            "a Ray data set that streams has no number of rows, which a mix needs",
            "Pass dataset.materialize()",
        )
    return source


def _joined(
    name: str, mix: Mix, sources: Mapping[str, Source], transform: Callable[..., Any] | None
) -> Source:
    """The sources as one data set.

    Raises:
        SourceError: their columns disagree, or the transform fails.
    """
    schema = agreed_schema(
        [(f"the source {each!r}", source.schema) for each, source in sources.items()],
        None,
        whole="all sources",
        way=", for example with DataConfig(transform=…)",
    )
    pieces = tuple(
        piece if source.schema.equals(schema, check_metadata=True) else _in_types(piece, schema)
        for source in sources.values()
        for piece in source.pieces
    )
    drawn = None
    if transform is not None and wants_generator(transform):
        drawn = random_transform(name, Pieces(schema=schema, pieces=pieces), transform)
    rows = tuple(sum(piece.rows for piece in source.pieces) for source in sources.values())
    mixture = Mixture(rows=rows, parts=parts_of([mix.weights[source] for source in sources]))
    length = _length(mix.epoch, mixture)
    return Source(
        info=info_of(name, schema if drawn is None else drawn.schema, length),
        schema=schema,
        pieces=pieces,
        transform=drawn,
        index=tuple({each: None for source in sources.values() for each in source.index}),
        mix=Mixed(
            mixture=mixture,
            pieces={each: len(source.pieces) for each, source in sources.items()},
        ),
    )


def _in_types(piece: Piece, schema: pa.Schema) -> Piece:
    """A piece of a source, in the types of the mix.

    Raises:
        SourceError: a type would change values of its file.
    """
    if isinstance(piece, FilePiece):
        return piece.in_types(schema, piece.constants)
    return ConformedPiece(piece, schema)


def _length(epoch: int | str, mixture: Mixture) -> int:
    """Number of rows in an epoch."""
    if epoch == "first_exhausted":
        # The next row would be one that came before.
        return min(mixture.position_of(source, rows) for source, rows in enumerate(mixture.rows))
    if epoch == "all_exhausted":
        last = (mixture.position_of(source, rows - 1) for source, rows in enumerate(mixture.rows))
        return max(last) + 1
    return int(epoch)


def _problems(name: str, field: str, mix: Mix) -> Iterator[Problem]:
    if name != "train":
        yield Problem(
            field=field,
            what="a mix is for the data set 'train': its sources begin again when they are "
            "exhausted, and an epoch may leave rows out",
            remedy="Pass each source as a data set of its own, which is read once",
        )
    sources: Any = mix.sources
    if not (isinstance(sources, Mapping) and sources):
        named = "empty" if isinstance(sources, Mapping) else a_type(sources)
        yield Problem(
            field=f"{field}.sources",
            what=f"it is {named}, not data sets by name",
            remedy='Pass Mix({"code": …, "web": …}, weights={"code": 0.3, "web": 0.7})',
        )
        return
    yield from _weight_problems(f"{field}.weights", mix)
    epoch: Any = mix.epoch
    if not (epoch in _ENDS if isinstance(epoch, str) else is_whole(epoch) and epoch >= 1):
        yield Problem(
            field=f"{field}.epoch",
            what=f"it is {quoted(epoch)}",
            remedy="Give a number of rows, at least 1, 'first_exhausted' or 'all_exhausted'",
        )


def _weight_problems(field: str, mix: Mix) -> Iterator[Problem]:
    weights: Any = mix.weights
    if not isinstance(weights, Mapping):
        yield Problem(
            field=field,
            what=f"it is {a_type(weights)}, not numbers by the sources' names",
            remedy="Pass weights={" + ", ".join(f"{each!r}: …" for each in mix.sources) + "}",
        )
        return
    for source in weights:
        if source not in mix.sources:
            yield Problem(
                field=f"{field}[{source!r}]",
                what="there is no such source",
                remedy=f"{did_you_mean(source, mix.sources)}There are: "
                f"{', '.join(map(str, mix.sources))}",
            )
    for source in mix.sources:
        if source not in weights:
            yield Problem(
                field=f"{field}[{source!r}]",
                what="it is missing",
                remedy="Give each source a number above 0, or leave the source out",
            )
        elif not _is_weight(weights[source]):
            yield Problem(
                field=f"{field}[{source!r}]",
                what=f"it is {quoted(weights[source])}",
                remedy="Give a number above 0, or leave the source out",
            )


def _is_weight(value: Any) -> bool:
    try:
        number = float(value)
        # Shares are computed from what is written.
        Fraction(str(value))
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, str | bytes | bool) and math.isfinite(number) and number > 0


def _option_problems(name: str, config: DataConfig) -> Iterator[Problem]:
    for option, why in (
        ("group", "batches of groups have no exact shares"),
        ("shards", "its batches take rows from anywhere in its sources"),
    ):
        if getattr(config, option) is not None:
            yield Problem(
                field=f"dataset_config[{name!r}].{option}",
                what=f"it isn't for a mix: {why}",
                remedy="Leave it out",
            )
