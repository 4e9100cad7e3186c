"""Ray datasets, and tables in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from polytrain.data.read.pieces import Piece, Pieces, selected
from polytrain.data.read.selection import agreed_schema, columns_to_read, subschema
from polytrain.data.types.missing import Missing, found_missing, noted
from polytrain.data.types.plain import plain_columns, plain_schema, refuse_unreadable
from polytrain.data.types.schemas import conformed


@dataclass(frozen=True, slots=True)
class ObjectPiece(Piece):
    """A table in Ray's object store; read without a copy on the node that holds it."""

    reference: Any
    rows: int
    schema: pa.Schema
    """The columns of the data set."""

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
    filled = [found for rows, found, _ in counted if rows]
    missing = {name for rows, _, names in counted if rows for name in names}
    names, index = columns_to_read(filled[0], columns) if filled else ([], ())
    schema = unified(filled, columns) if filled else pa.schema([])
    schema = noted(subschema(schema, names), missing)
    pieces = tuple(
        ObjectPiece(reference, rows, schema)
        for reference, (rows, *_) in zip(references, counted, strict=True)
        if rows
    )
    return Pieces(schema=schema, pieces=pieces, index=index)


def unified(schemas: Sequence[pa.Schema], columns: Sequence[str] | None) -> pa.Schema:
    """The schema that holds the rows of all blocks.

    Raises:
        SourceError: there is none.
    """
    for schema in schemas:
        names = schema.names if columns is None else columns
        refuse_unreadable(subschema(schema, [name for name in names if name in schema.names]))
    blocks = [(f"block {number}", schema) for number, schema in enumerate(schemas)]
    return agreed_schema(blocks, columns, whole="all rows")


def _rows_and_schema(table: pa.Table) -> tuple[int, pa.Schema, set[Missing]]:
    schema = plain_schema(table.schema).with_metadata(table.schema.metadata)
    return table.num_rows, schema, found_missing(table)
