"""What a shard's batches are before they become tensors: their format, texts, and missing rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from polytrain.extension import to_format
from polytrain_plugins import Shard

if TYPE_CHECKING:
    import pyarrow as pa

_TEXTS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def refuse_texts(schema: pa.Schema) -> None:
    """Name the columns that can't become tensors, before the first batch.

    Raises:
        TypeError: there are some.
    """
    texts = [field.name for field in schema if _is_text(field.type)]
    if texts:
        raise TypeError(
            f"{', '.join(map(repr, texts))}: texts can't become a tensor. Encode it as numbers in "
            "DataConfig(transform=…), leave it out with DataConfig(columns=[…]), or pass "
            "collate_fn."
        )


def _is_text(kind: pa.DataType) -> bool:
    return str(getattr(kind, "value_type", kind)) in _TEXTS


def format_for(collate_fn: Any) -> Literal["numpy", "pandas", "arrow"]:
    """The format that a collate function takes; a class of Ray Data has it in its name."""
    bases = {base.__name__ for base in type(collate_fn).__mro__}
    if "ArrowBatchCollateFn" in bases:
        return "arrow"
    return "pandas" if "PandasBatchCollateFn" in bases else "numpy"


class StandIn:
    """What a rank gets for a batch in which it has no row."""

    def __init__(self, shard: Shard, batch_format: str) -> None:
        self._shard = shard
        self._format = batch_format
        self._row: Any = None
        """The first row; of a stream, whose rows can't be read again, the last one."""

    def of(self, batch: Any) -> Any:
        """The batch, or one row if it has none."""
        is_stream = self._shard.total_rows is None
        if _num_rows(batch):
            if is_stream:
                self._row = _last_row(batch)
            return batch
        if self._row is None and not is_stream:
            # The same row after a restart.
            self._row = to_format(self._shard.read(range(1)), self._format)
        # The user may write to it.
        return batch if self._row is None else _last_row(self._row)


def _num_rows(batch: Any) -> int:
    return len(next(iter(batch.values()), (0,))) if isinstance(batch, dict) else len(batch)


def _last_row(batch: Any) -> Any:
    """A copy of a batch's last row."""
    if isinstance(batch, dict):
        return {name: array[-1:].copy() for name, array in batch.items()}
    return batch.slice(len(batch) - 1) if hasattr(batch, "slice") else batch.iloc[-1:].copy()
