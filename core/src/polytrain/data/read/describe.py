"""Describes the data sets that users pass, as pieces that any process can read rows from.

A source is described in the driver, where everything that is wrong with it comes to light; its
pieces travel to whoever reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from polytrain.config.mix import Mix
from polytrain.data.plan.mixture import Mixture
from polytrain.data.read.files import from_arrow_dataset, from_places, is_arrow_dataset
from polytrain.data.read.indexed import from_items, is_map_style
from polytrain.data.read.packing import packed
from polytrain.data.read.pieces import Piece, Pieces
from polytrain.data.read.selection import columns_to_read, subschema
from polytrain.data.read.tables import (
    are_dicts,
    from_memory,
    from_table,
    gives_rows,
    is_of_torch,
    is_place,
    table_of_dicts,
)
from polytrain.data.read.transforms import (
    RandomTransform,
    random_transform,
    transformed,
    wants_generator,
)
from polytrain.data.types.plain import refuse_unreadable
from polytrain.data_errors import SourceError
from polytrain.ray_api import is_ray_dataset
from polytrain_plugins import DatasetInfo
from polytrain_plugins.type_names import a_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """The sources of a mix. Their pieces follow one another."""

    mixture: Mixture
    pieces: Mapping[str, int]
    """Number of pieces of each source, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A data set: facts for the user, and its pieces in order."""

    info: DatasetInfo
    schema: pa.Schema
    """The columns that the pieces read."""

    pieces: tuple[Piece, ...]

    stream: Any = None
    """A Ray dataset whose pipeline runs while workers train; there are no pieces then."""

    transform: RandomTransform | None = None
    """A function for batches of the rows that the pieces read."""

    index: tuple[str, ...] = ()
    """Columns that were left out because they hold the index of a DataFrame."""

    mix: Mixed | None = None

    def sources(self) -> Iterator[tuple[str, Source]]:
        """Yield each source of a mix, with its name."""
        start = 0
        for name, count in self.mix.pieces.items() if self.mix is not None else ():
            yield name, replace(self, pieces=self.pieces[start : start + count], mix=None)
            start += count

    @property
    def in_memory(self) -> bool:
        """Whether the rows lie in this process, rather than where every node can read them."""
        return self.stream is None and all(piece.in_memory for piece in self.pieces)


def describe(
    name: str,
    data: Any,
    *,
    columns: Sequence[str] | None = None,
    transform: Callable[..., Mapping[str, Any]] | None = None,
    pack: int | None = None,
) -> Source:
    """Describe a data set.

    Parquet files are known by their footers and a map-style data set by its first item. All other
    data are read once, by blocks.

    Args:
        name: the data set's name.
        data: a path, an address, a glob, a directory or a list of them, of Parquet, CSV, TSV,
            JSON Lines or Arrow files; a pandas or polars frame; an Arrow table, or anything that
            gives Arrow tables; a dict of arrays of equal length; dicts, in a list or whatever
            gives them; a Hugging Face, pyarrow or Ray dataset; or an object that gives items by
            number, such as PyTorch's map-style `Dataset`.
        columns: which columns, in which order; by default all but those of a DataFrame's index.
        transform: applied wherever rows are read: takes a dict of column name to array, of
            consecutive rows, and returns such a dict of as many rows. With a parameter `rng` it is
            applied to batches.
        pack: see `DataConfig.pack`.

    Raises:
        SourceError: if there is nothing, or nothing that can be read.
    """
    columns = _as_list(columns)
    if is_ray_dataset(data) and (stream := _streaming(name, data, columns, transform, pack)):
        return stream
    found = _found(data, columns)
    num_rows = sum(piece.rows for piece in found.pieces)
    if num_rows == 0:
        raise SourceError("it has no rows", "Pass a data set with rows")
    draws = transform is not None and wants_generator(transform)
    if transform is not None and not draws:
        found = transformed(name, found, transform)
    if pack is not None:
        found = packed(found, pack)
        num_rows = sum(piece.rows for piece in found.pieces)
    drawn = random_transform(name, found, transform) if transform is not None and draws else None
    return Source(
        info=info_of(name, found.schema if drawn is None else drawn.schema, num_rows),
        schema=found.schema,
        pieces=found.pieces,
        transform=drawn,
        index=found.index,
    )


def _as_list(columns: Any) -> Any:
    """Return the names in a collection, such as an Index of pandas, as a list."""
    if columns is None or isinstance(columns, str):
        return columns
    try:
        return list(columns)
    except TypeError as error:
        what = f"columns={columns!r} is no list of names"
        raise SourceError(what, 'Pass columns=["…", …]') from error


def computed(source: Source) -> Source:
    """Run a stream's pipeline now, and describe its rows."""
    return describe(source.info.name, source.stream.materialize(), columns=source.schema.names)


def _streaming(
    name: str, dataset: Any, columns: Sequence[str] | None, transform: Any, pack: int | None
) -> Source | None:
    """Describe a Ray dataset whose pipeline runs while workers train; None if it has run."""
    from polytrain.data.read.ray_data import is_computed, stream_schema

    if is_computed(dataset):
        return None
    if pack is not None:
        raise SourceError(
            "pack is not for a Ray dataset that streams: the lengths of all lists must be known",
            "Pass dataset.materialize()",
        )
    if transform is not None:
        raise SourceError(
            "a transform is not for a Ray dataset that streams",
            "Put it into the pipeline: dataset.map_batches(transform)",
        )
    schema = stream_schema(dataset)
    names, index = columns_to_read(schema, columns)
    schema = subschema(schema, names)
    refuse_unreadable(schema)
    info = info_of(name, schema, None)
    return Source(info=info, schema=schema, pieces=(), stream=dataset, index=index)


def info_of(name: str, schema: pa.Schema, num_rows: int | None) -> DatasetInfo:
    """The facts about a data set for users and backends."""
    return DatasetInfo(name=name, columns=tuple(schema.names), num_rows=num_rows, schema=schema)


def _found(data: Any, columns: Sequence[str] | None) -> Pieces:
    if isinstance(data, Mix):
        raise SourceError(
            "a Mix is for training, and can't be a source of another one",
            'Pass it as datasets={"train": Mix(…)}; its weights may be those of all sources',
        )
    if is_place(data):
        return from_places([str(data)], columns, listed=False)
    if isinstance(data, list | tuple) and not data:
        raise SourceError("the list is empty", "If it is from a glob, check the glob's path")
    if isinstance(data, list | tuple) and all(map(is_place, data)):
        return from_places([str(place) for place in data], columns, listed=True)
    if are_dicts(data):
        return from_table(table_of_dicts(data, columns), columns)
    if is_ray_dataset(data):
        from polytrain.data.read.ray_data import from_ray_data

        return from_ray_data(data, columns)
    if is_arrow_dataset(data):
        return from_arrow_dataset(data, columns)
    table = from_memory(data, columns)
    if table is not None:
        return table
    if is_map_style(data):
        return from_items(data, columns)
    if gives_rows(data):
        return from_table(table_of_dicts(data, columns), columns)
    kind = type(data)
    is_builtin = kind.__module__ == "builtins"
    named = a_type(data) if is_builtin else f"{kind.__module__}.{kind.__qualname__}"
    raise SourceError(f"{named} is not a data set", _way(data))


def _way(data: Any) -> str:
    """The remedy for an object that is not a data set."""
    if hasattr(data, "dtype") or isinstance(data, pa.Array | pa.ChunkedArray):
        return 'Give it a name: {"x": …}'
    if is_of_torch(data):
        return (
            "Make it in the training function, and pass it, or a DataLoader over it, through "
            "polytrain_torch.prepare_data_loader"
        )
    return (
        "Pass a path or glob of Parquet, CSV, TSV, JSON Lines or Arrow files, a pandas or polars "
        "DataFrame, an Arrow table, a dict of arrays, a list of dicts, a Hugging Face or Ray "
        "dataset, or an object with __getitem__ and __len__"
    )
