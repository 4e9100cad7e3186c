"""Ray datasets, and tables in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from polytrain.common.data_errors import SourceError
from polytrain.data.sources.arrays import nested_lists, tensors_of
from polytrain.data.sources.pieces import Piece, Pieces, selected
from polytrain.data.sources.schemas import chosen, conformed, subschema, unified_type


@dataclass(frozen=True, slots=True)
class ObjectPiece(Piece):
    """A table in Ray's object store; read without a copy on the node that holds it."""

    reference: Any
    rows: int
    schema: pa.Schema
    """Of the data set, which other tables may be parts of as well."""

    @property
    def where(self) -> str:
        return "table in the object store"

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        import ray

        schema = self.schema if columns is None else subschema(self.schema, columns)
        table = selected(ray.get(self.reference), schema.names).slice(start, stop - start)
        return conformed(plain_columns(table), schema, self.where)

    def seekable(self, *, scattered: bool) -> bool:
        # Worker processes would have to join the cluster for it.
        return False


def is_ray_dataset(data: Any) -> bool:
    """Whether this is a `ray.data.Dataset`; Ray Data is not imported to find out."""
    return type(data).__module__.startswith("ray.data.")


def is_computed(dataset: Any) -> bool:
    """Whether a Ray dataset's pipeline has been run to its end."""
    from ray.data.dataset import MaterializedDataset

    return isinstance(dataset, MaterializedDataset)


def from_ray_data(dataset: Any, columns: Sequence[str] | None) -> Pieces:
    """Run the dataset's pipeline and have its blocks as pieces."""
    import ray

    references = dataset.to_arrow_refs()
    count = ray.remote(num_cpus=0)(_rows_and_schema)
    counted = ray.get([count.remote(reference) for reference in references])
    filled = [found for rows, found in counted if rows]
    schema = _unified(filled, columns) if filled else pa.schema([])
    pieces = tuple(
        ObjectPiece(reference, rows, schema)
        for reference, (rows, _) in zip(references, counted, strict=True)
        if rows
    )
    return Pieces(schema=schema, pieces=pieces)


def plain_columns(table: pa.Table) -> pa.Table:
    """The table with Ray's own tensor columns turned into Arrow's, which need no Ray to be read.

    Those of tensors of different shapes become nested lists.
    """
    for index, field in enumerate(table.schema):
        if type(field.type).__module__.startswith("ray."):
            plain = _plain(table.column(index))
            table = table.set_column(index, field.name, plain)
    return table


def _plain(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks().to_numpy(zero_copy_only=False)
    dimensions = getattr(column.type, "ndim", None)
    if dimensions is None:
        return tensors_of(array)
    return nested_lists(array, dimensions, column.type.storage_type.field("data").type.value_type)


def _unified(schemas: Sequence[pa.Schema], columns: Sequence[str] | None) -> pa.Schema:
    """The schema that holds the rows of all blocks."""
    first, *rest = schemas
    names = first.names if columns is None else chosen(columns, first.names)
    types = {name: first.field(name).type for name in names}
    for schema in rest:
        for name, kind in types.items():
            if name not in schema.names:
                raise SourceError(
                    f"some blocks have no column {name!r}", "Give all rows the same columns"
                )
            own = schema.field(name).type
            both = unified_type(kind, own)
            if both is None:
                raise SourceError(
                    f"the column {name!r} is {kind} in one block and {own} in another",
                    "Give the columns of all rows the same types",
                )
            types[name] = both
    return pa.schema(types.items())


def _rows_and_schema(table: pa.Table) -> tuple[int, pa.Schema]:
    plain = plain_columns(table.slice(0, 1)) if table.num_rows else table
    return table.num_rows, plain.schema
