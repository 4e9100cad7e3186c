"""The type that fits all values of a CSV column, of which parts have been looked at one by one.

Arrow infers the type of a whole column, from all its values, or of a stream, from its first block.
What is needed here is the first without holding the column, so each block is inferred for itself.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.csv as pacsv


def types_of_block(block: pa.RecordBatch) -> list[pa.DataType]:
    """The types that Arrow would infer for some rows of a CSV file.

    Args:
        block: the rows, every value as the text that it is in the file.
    """
    # Written and parsed once more: only Arrow's parser tells what Arrow's parser would make of it.
    sink = pa.BufferOutputStream()
    pacsv.write_csv(block, sink)
    written = sink.getvalue()
    table = pacsv.read_csv(
        pa.BufferReader(written),
        parse_options=pacsv.ParseOptions(newlines_in_values=True),
        read_options=pacsv.ReadOptions(block_size=max(1 << 20, written.size)),
    )
    return [column.type for column in table.columns]


def candidate(kinds: set[pa.DataType]) -> tuple[pa.DataType, bool]:
    """The type that should fit values that look like these, and whether it is certain to.

    Text fits where nothing else does.
    """
    kinds = kinds - {pa.null()}
    if not kinds:
        return pa.null(), True
    if len(kinds) == 1:
        return next(iter(kinds)), True
    if kinds == {pa.int64(), pa.float64()}:
        return pa.float64(), True
    if kinds == {pa.int64(), pa.bool_()}:
        # 0 and 1 are truth values too; other numbers are not.
        return pa.bool_(), False
    if all(pa.types.is_date(kind) or pa.types.is_timestamp(kind) for kind in kinds):
        times = [kind for kind in kinds if pa.types.is_timestamp(kind)]
        finest = next((kind for kind in times if kind.unit == "ns"), times[0])
        return finest, False
    return pa.string(), True
