"""A shard with batches of tensors: dtypes, padding rows, and gradient weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from polytrain.extension import TensorShapes, check_named, check_range, to_format
from polytrain_plugins import Batches, Shard, ShardView, VirtualBatch
from polytrain_torch.devices import current_device
from polytrain_torch.models.shared_tensors import rows_are_divided
from polytrain_torch.moving import moved
from polytrain_torch.predictions.options import is_text
from polytrain_torch.row_weights import WeightedLoop, weighted_loop
from polytrain_torch.survivors.points import epoch_is_over, has_batch, next_batch
from polytrain_torch.virtual_workers import current

if TYPE_CHECKING:
    import pyarrow as pa

_RAGGED_REMEDY = (
    "Pass collate_fn=… to iter_torch_batches, which makes tensors from a dict of arrays, or bring "
    "all rows to one shape in DataConfig(transform=…)."
)


class TorchShard(ShardView):
    """A shard that also yields batches of tensors.

    Gradients of prepared models are weighted by each batch's rows.
    """

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        self._is_weighted_by_function = False
        self._loop: WeightedLoop | None = None

    @property
    def gradient_weight(self) -> float:  # type: ignore[override]  # see ShardView
        """This rank's share of the latest global batch, times the number of ranks.

        Once it is read, gradients of this shard aren't weighted automatically: scale the loss.
        """
        if current() is not None:
            raise RuntimeError(
                "gradient_weight isn't one number with ScalingConfig(virtual_workers=…): "
                "micro_batches(…) weights each micro-batch's gradients. Leave it out, or call "
                "weigh_rows(False) for a loss that isn't a mean over rows."
            )
        self._is_weighted_by_function = True
        if self._loop is not None:
            self._loop.weight.value = 1
        return self._shard.gradient_weight

    def iter_batches(self, **arguments: Any) -> Batches:
        sizes = arguments.get("batch_size"), arguments.get("global_batch_size")
        return self._weighted(self._shard.iter_batches(**arguments), sizes)

    def _weighted(
        self,
        batches: Batches,
        sizes: tuple[int | None, int | None],
        collate: Callable[[Any], Any] | None = None,
    ) -> Batches:
        """Return batches that set the weights of gradients.

        Args:
            sizes: rows of a worker's batch and of a global batch, as the user has given them.
            collate: makes a batch of each one, on the thread of the loop.
        """

        def weighted() -> Iterator[Any]:
            if self.total_rows is None or len(self) < self.total_rows:
                rows_are_divided()
            virtual, (own, of_all) = current(), sizes
            if virtual is not None and (own or of_all):
                virtual.cut(self.name, own or (of_all or 0) // virtual.count)
            with weighted_loop() as loop:
                self._loop = loop
                next_batch()
                for batch in batches:
                    has_batch()
                    is_weighted = self._is_weighted_by_function
                    if isinstance(batch, VirtualBatch):
                        # Its micro-batches are weighted in the loop over them.
                        batch = batch if virtual is None else virtual.fetched(batch, collate)
                    else:
                        batch = batch if collate is None else collate(batch)
                        loop.given(1 if is_weighted else self._shard.gradient_weight, batch)
                    yield batch
                    next_batch()
                epoch_is_over()

        return Batches(weighted, batches.__len__)

    def iter_torch_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
        prefetch_batches: int = 1,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: torch.device | str | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        local_shuffle_buffer_size: None = None,
        local_shuffle_seed: None = None,
        pin_memory: bool = False,
    ) -> Batches:
        """Return batches, dicts of column name to tensor. Each iteration is an epoch. See
        `Shard.iter_batches`.

        A column has shape (rows,); a column of lists, (rows, length, …) if all have one shape.

        If a global batch has fewer rows than there are workers, a worker without a row gets one of
        its own rows again, or another worker's if it has none, so that its loss isn't the mean of
        nothing; `gradient_weight` is 0 then.

        Args:
            batch_size: maximum number of rows in a worker's batch.
            global_batch_size: maximum number of rows in the batches of all workers together.
            drop_last: yield full batches only.
            prefetch_batches: number of batches that a thread prepares ahead and copies to the
                device.
            dtypes: dtype of all columns, or of each by name; otherwise that of the data.
            device: device of the tensors; this worker's own device by default, as with "auto".
            collate_fn: makes a batch from a dict of column name to NumPy array, for example padded
                tensors from lists of different lengths (an array of arrays). It runs on the thread
                that prepares batches; with virtual workers, on the loop's. Tensors in the dicts,
                lists and tuples that it returns are moved to the device. A collate class of Ray
                Data gets its own input format.
            local_shuffle_buffer_size: refused; the data set's `DataConfig` sets its order.
            local_shuffle_seed: refused too.
            pin_memory: no effect; columns are always copied to a GPU from pinned memory.

        Raises:
            ValueError: both `collate_fn` and `dtypes` are given, or a refused argument is; `dtypes`
                names an unknown column, or an integer dtype that can't hold the values.
            TypeError: without `collate_fn`, a column has texts (raised at once), other values than
                numbers and booleans, or lists of different shapes.
        """
        if collate_fn is not None and dtypes is not None:
            raise ValueError(
                f"dtypes={dtypes!r}: it can't be used with collate_fn, which makes the tensors. "
                "Convert them in collate_fn"
            )
        check_named(dtypes, self.schema().names)
        if collate_fn is None:
            refuse_texts(self.schema())
        target = current_device() if device in (None, "auto") else torch.device(device)
        shapes = TensorShapes(self.name, _RAGGED_REMEDY)
        batch_format = format_for(collate_fn)
        padding = PaddingRow(self._shard, batch_format)

        def collated(batch: Any) -> Any:
            assert collate_fn is not None
            return moved(collate_fn(batch), target)

        # With virtual workers, what collate_fn draws depends on the batch, and not on its thread.
        in_loop = collate_fn is not None and current() is not None

        def tensors(batch: Any) -> Any:
            batch = padding.of(batch)
            if collate_fn is not None:
                return batch if in_loop else collated(batch)
            for name, array in batch.items():
                shapes.check(name, array)
            return {
                name: _on_device(_tensor(name, array, dtypes), target)
                for name, array in batch.items()
            }

        batches = self._shard.iter_batches(
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            prefetch_batches=prefetch_batches,
            batch_format=batch_format,
            convert=tensors,
            # A loop without gradients doesn't weight rows, and needs each row exactly once.
            allow_empty=torch.is_grad_enabled(),
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
        )
        sizes = batch_size, global_batch_size
        return self._weighted(batches, sizes, collated if in_loop else None)


def _tensor(name: str, array: Any, dtypes: Any) -> torch.Tensor:
    dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
    has_all = dtype in (None, torch.bool) or dtype.is_floating_point or dtype.is_complex
    if not has_all:
        ends = torch.iinfo(dtype)
        check_range(name, array, ends.min, ends.max)
    try:
        return torch.as_tensor(array, dtype=dtype)
    except TypeError as error:
        raise TypeError(
            f"The column {name!r} of type {array.dtype} can't become a tensor. "
            "Encode it as numbers in DataConfig(transform=…)."
        ) from error


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from pinned memory runs while the device computes.
    return tensor.pin_memory().to(device, non_blocking=True)


def refuse_texts(schema: pa.Schema) -> None:
    """Refuse columns of texts, before the first batch.

    Raises:
        TypeError: there are some; the message names them.
    """
    texts = [field.name for field in schema if is_text(field.type)]
    if texts:
        raise TypeError(
            f"{', '.join(map(repr, texts))}: texts can't become a tensor. Encode it as numbers in "
            "DataConfig(transform=…), leave it out with DataConfig(columns=[…]), or pass "
            "collate_fn."
        )


def format_for(collate_fn: Any) -> Literal["numpy", "pandas", "arrow"]:
    """Return the batch format that a collate function takes; Ray Data's classes name theirs."""
    bases = {base.__name__ for base in type(collate_fn).__mro__}
    if "ArrowBatchCollateFn" in bases:
        return "arrow"
    return "pandas" if "PandasBatchCollateFn" in bases else "numpy"


class PaddingRow:
    """Pads empty batches with a row, for a rank that has none in a global batch."""

    def __init__(self, shard: Shard, batch_format: str) -> None:
        self._shard = shard
        self._format = batch_format
        self._row: Any = None
        """The shard's first row; of a stream, which can't be read again, the latest one."""

    def of(self, batch: Any) -> Any:
        """Return the batch, or one row if it is empty."""
        is_stream = self._shard.total_rows is None
        if _num_rows(batch):
            if is_stream:
                self._row = _last_row(batch)
            return batch
        if self._row is None and not is_stream:
            # The first row, so that it is the same after a restart.
            self._row = to_format(self._shard.padding_row(), self._format)
        # A copy: the user may write to it.
        return batch if self._row is None else _last_row(self._row)


def _num_rows(batch: Any) -> int:
    return len(next(iter(batch.values()), (0,))) if isinstance(batch, dict) else len(batch)


def _last_row(batch: Any) -> Any:
    """Return a copy of a batch's last row."""
    if isinstance(batch, dict):
        return {name: array[-1:].copy() for name, array in batch.items()}
    return batch.slice(len(batch) - 1) if hasattr(batch, "slice") else batch.iloc[-1:].copy()
