"""The type that fits all values of a CSV column, of which parts have been looked at one by one.

Arrow infers the type of a whole column, from all its values, or of a stream, from its first block.
What is needed here is the first without holding the column, so each block is inferred for itself.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

EXACT = 2**53
"""Up to here a 64-bit float holds every whole number."""


MISSING = [*pacsv.ConvertOptions().null_values, "<NA>", "None"]
"""What stands for a missing value, except in a column of text: what does in pandas."""


class ColumnFacts:
    """What is noticed of columns while their file is read once."""

    def __init__(self) -> None:
        self.rows = 0
        self.missing: set[str] = set()
        """Columns in which values are missing."""

        self.large: set[str] = set()
        """Columns of numbers some of which are `EXACT` or more."""

    def add(self, block: pa.RecordBatch | pa.Table) -> None:
        """Some more rows, in the types that they seem to have."""
        self.rows += block.num_rows
        for field, column in zip(block.schema, block.columns, strict=True):
            if column.null_count:
                self.missing.add(field.name)
            if pa.types.is_int64(field.type) or pa.types.is_float64(field.type):
                ends = pc.min_max(column)
                if any(end.is_valid and abs(end.as_py()) >= EXACT for end in ends.values()):
                    self.large.add(field.name)


def first_rounded(block: pa.RecordBatch) -> tuple[str, str] | None:
    """A column and the whole number in it, both as text, that a 64-bit float would not hold.

    Args:
        block: some rows of a CSV file, every value as the text that it is in the file.
    """
    for name, column in zip(block.schema.names, block.columns, strict=True):
        digits = column.filter(pc.match_substring_regex(column, r"^\s*[+-]?[0-9]{16,}\s*$"))
        for text in digits.to_pylist():
            if int(float(text)) != int(text):
                return name, text
    return None


def typed_block(block: pa.RecordBatch) -> pa.Table:
    """Some rows of a CSV file in the types that Arrow would infer for them.

    Args:
        block: the rows, every value as the text that it is in the file.
    """
    # Written and parsed once more: only Arrow's parser tells what Arrow's parser would make of it.
    sink = pa.BufferOutputStream()
    pacsv.write_csv(block, sink)
    written = sink.getvalue()
    return pacsv.read_csv(
        pa.BufferReader(written),
        parse_options=pacsv.ParseOptions(newlines_in_values=True),
        read_options=pacsv.ReadOptions(block_size=max(1 << 20, written.size)),
        convert_options=pacsv.ConvertOptions(null_values=MISSING),
    )


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
