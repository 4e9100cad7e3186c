"""Ray datasets, and tables in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from polytrain.data.sources.arrays import tensors_of
from polytrain.data.sources.pieces import Piece, Pieces, selected
from polytrain.data.sources.schemas import chosen, subschema


@dataclass(frozen=True, slots=True)
class ObjectPiece(Piece):
    """A table in Ray's object store; read without a copy on the node that holds it."""

    reference: Any
    rows: int
    columns: tuple[str, ...] | None = None
    """Those that the data set is about; all by default."""

    @property
    def where(self) -> str:
        return "table in the object store"

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        import ray

        table = selected(ray.get(self.reference), self.columns if columns is None else columns)
        return plain_columns(table).slice(start, stop - start)

    def seekable(self, *, scattered: bool) -> bool:
        # Trainers would have to join the cluster for it.
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
    filled = [schema for rows, schema in counted if rows]
    schema = filled[0] if filled else pa.schema([])
    if filled and columns is not None:
        schema = subschema(schema, chosen(columns, schema.names))
    names = None if columns is None else tuple(columns)
    pieces = tuple(
        ObjectPiece(reference, rows, names)
        for reference, (rows, _) in zip(references, counted, strict=True)
    )
    return Pieces(schema=schema, pieces=pieces)


def plain_columns(table: pa.Table) -> pa.Table:
    """The table with Ray's own tensor columns turned into Arrow's, which need no Ray to be read."""
    for index, field in enumerate(table.schema):
        if type(field.type).__module__.startswith("ray."):
            array = table.column(index).combine_chunks().to_numpy(zero_copy_only=False)
            table = table.set_column(index, field.name, tensors_of(array))
    return table


def _rows_and_schema(table: pa.Table) -> tuple[int, pa.Schema]:
    plain = plain_columns(table.slice(0, 1)) if table.num_rows else table
    return table.num_rows, plain.schema
