"""Ray datasets: computed ones as pieces, others block by block, in order, beside the workers."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayError

from polytrain.data.plan.stream_partitioner import BlockRows
from polytrain.data.read.pieces import Piece, Pieces, selected
from polytrain.data.read.selection import agreed_schema, columns_to_read, subschema
from polytrain.data.types.plain import (
    Missing,
    found_missing,
    noted,
    plain_columns,
    plain_schema,
    refuse_unreadable,
)
from polytrain.data.types.schemas import conformed
from polytrain.data_errors import SourceError, is_library, raised_at
from polytrain.ray_api.private import count_executions


@dataclass(frozen=True, slots=True)
class ObjectPiece(Piece):
    """A table in Ray's object store; read without a copy on the node that holds it."""

    reference: Any
    rows: int
    schema: pa.Schema

    @property
    def where(self) -> str:
        return "table in the object store"

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
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


_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
"""A line of a traceback that says where its next line is."""

_MOST_LOOKED_AT = 8
"""Blocks that the pipeline computes, at most, before its columns' types are taken as known."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Pipeline:
    """One execution of a dataset, pulled block by block, one block ahead of what is asked for."""

    def __init__(self, dataset: Any) -> None:
        # Ray Data blocks; the thread does nothing but wait in it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polytrain-pipeline")
        self._blocks = blocks_of(dataset)
        self.next_block = self._pull()

    def advance(self) -> None:
        """Have the block after the next one pulled."""
        self.next_block = self._pull()

    def stop(self) -> None:
        """End the execution. What it is about to yield is waited for, but by nobody."""
        self._thread.submit(self._blocks.close)
        self._thread.shutdown(wait=False)

    def _pull(self) -> asyncio.Future[BlockRows[Any] | None]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._thread, next, self._blocks, None)


def stream_schema(dataset: Any) -> pa.Schema:
    """The columns of a dataset, as `read_part` can give them, and pandas' notes of an index.

    Free where Ray Data can tell them without running anything, which a function of the user's
    prevents. Otherwise the pipeline runs until its first block: a read and the functions on it, but
    everything that comes before a shuffle, a sort or a repartition. It runs on, for some blocks,
    where a column has no value in the first.

    Raises:
        SourceError: there are no rows, or the pipeline fails.
    """
    known = dataset.schema(fetch_if_missing=False)
    schema = None if known is None else known.base_schema
    if isinstance(schema, pa.Schema) and not _needs_values(schema):
        return plain_schema(schema).with_metadata(schema.metadata)
    found: pa.Schema | None = None
    try:
        for rows in islice(filter(len, blocks_of(dataset)), _MOST_LOOKED_AT):
            # All the values of a DataFrame show its types, and one tensor the shape of all.
            table = as_arrow(ray.get(rows.block))
            own = plain_schema(table.schema).with_metadata(table.schema.metadata)
            found = own if found is None else _completed(found, own)
            if not any(map(pa.types.is_null, found.types)):
                break
    except Exception as error:
        raise SourceError(
            f"its pipeline failed: {reason_of(error)}",
            "Make it run by itself first: dataset.take(1)",
        ) from error
    if found is None:
        raise SourceError("it has no rows", "Pass a data set with rows")
    return found


def cpu_shortage(dataset: Any, held: Mapping[str, float], total: float) -> str | None:
    """Return why the pipeline would find no CPU beside the workers; None if it finds one.

    Args:
        dataset: a `ray.data.Dataset`. One that is materialised needs no CPU.
        held: resources that the workers hold, all of them together.
    """
    if total - held.get("CPU", 0) >= 1 or is_computed(dataset):
        return None
    return (
        f"its pipeline needs a CPU beside the workers, which hold {held.get('CPU', 0):g} of the "
        f"cluster's {total:g}"
    )


def prepared(dataset: Any, epoch: int, held: Mapping[str, float]) -> Any:
    """A copy of the dataset that yields its blocks in order, beside the workers."""
    dataset = copy.deepcopy(dataset)
    context = dataset.context
    context.enable_progress_bars = False
    count_executions(context, epoch)
    options = context.execution_options
    options.preserve_order = True
    totals: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    limits = options.resource_limits
    # At least one CPU, so that a pipeline without any waits for one to come free. (What Ray Train
    # uses for this, `exclude_resources`, is going to be removed.)
    cpus = max(totals.get("CPU", 0) - held.get("CPU", 0), 1)
    gpus = max(totals.get("GPU", 0) - held.get("GPU", 0), 0)
    options.resource_limits = limits.copy(cpu=min(limits.cpu, cpus), gpu=min(limits.gpu, gpus))
    return dataset


def blocks_of(dataset: Any) -> Generator[BlockRows[Any], None, None]:
    """The blocks that the pipeline yields, in order. Closing it ends the execution."""
    for bundle in dataset.iter_internal_ref_bundles():
        cuts = bundle.slices or [None] * len(bundle.block_refs)
        for block, metadata, cut in zip(bundle.block_refs, bundle.metadata, cuts, strict=True):
            if cut is not None:
                yield BlockRows(block, cut.start_offset, cut.end_offset)
            elif metadata.num_rows is not None:
                yield BlockRows(block, 0, metadata.num_rows)
            else:
                yield BlockRows(block, 0, ray.get(_count.remote(block)))


@ray.remote(num_cpus=0)
def _count(block: Any) -> int:
    return len(block)


def plain_rows(block: Any, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
    """Some rows of a block, in types that need no Ray to be read."""
    rows = block.slice(start, stop - start) if isinstance(block, pa.Table) else block[start:stop]
    table = as_arrow(rows)
    return plain_columns(table.select([name for name in columns if name in table.column_names]))


def as_arrow(block: Any) -> pa.Table:
    """A block, which may be a DataFrame, as a table."""
    if isinstance(block, pa.Table):
        return block
    return pa.Table.from_pandas(block, preserve_index=False)


def _needs_values(schema: pa.Schema) -> bool:
    """Whether there are columns whose plain types only their values show: Ray's tensors, and those
    that have no value so far."""
    return any(
        pa.types.is_null(kind) or type(kind).__module__.startswith("ray.") for kind in schema.types
    )


def _completed(schema: pa.Schema, later: pa.Schema) -> pa.Schema:
    """A schema, with the types that columns without a value have in later rows."""
    return pa.schema(
        [
            later.field(field.name)
            if pa.types.is_null(field.type) and field.name in later.names
            else field
            for field in schema
        ],
        metadata=schema.metadata,
    )


def reason_of(error: Exception) -> str:
    """Return in one line the exception that was raised first: Ray wraps it, with tracebacks."""
    if not isinstance(error, RayError):
        return raised_at(error)
    first, _, _ = plain_text(str(error)).partition("\n\nThe above exception was")
    raised = first.strip().splitlines()[-1]
    places = [place for place in _FRAME.finditer(first) if not is_library(place["file"])]
    if not places:
        return raised
    return f"{raised} ({places[-1]['file']}, line {places[-1]['line']}, in {places[-1]['name']})"


def plain_text(text: str) -> str:
    """Text without the colours that Ray puts into it."""
    return _COLOUR.sub("", text)
