"""Passes a shard's batches to Hugging Face's `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from polytrain_plugins import Batches, Shard
from polytrain_torch.row_weights import weigh_backward, weight_of, weighted_loop
from polytrain_torch.transformers.made_by import epoch_of

_NO_LABEL = -100
"""The label that Transformers' losses ignore."""


def take_batches(trainer: Trainer, *, is_resumed: Callable[[], bool]) -> None:
    """Have a trainer accept a shard's batches as any of its data sets.

    Args:
        trainer: the trainer, before `train()` is called.
        is_resumed: returns whether this call of `train()` resumes from a checkpoint of the run,
            which also has the shard's position.

    Raises:
        TypeError: a data set is a shard itself.
        ValueError: `auto_find_batch_size` is set, but the shard's batches have a size already.
    """
    _check(trainer)
    own_train, own_eval = trainer.get_train_dataloader, trainer.get_eval_dataloader
    own_test = trainer.get_test_dataloader
    own_step, own_prediction = trainer.training_step, trainer.prediction_step
    is_padding = False

    def train_loader() -> Any:
        batches = trainer.train_dataset
        if not isinstance(batches, Batches):
            return own_train()
        return _TrainingLoader(_TrainingBatches(batches, trainer, is_resumed=is_resumed()))

    def eval_loader(eval_dataset: Any = None) -> Any:
        given = trainer.eval_dataset if eval_dataset is None else eval_dataset
        batches = trainer.eval_dataset[given] if isinstance(given, str) else given
        return read_loader(batches) if isinstance(batches, Batches) else own_eval(eval_dataset)

    def test_loader(test_dataset: Any) -> Any:
        is_given = isinstance(test_dataset, Batches)
        return read_loader(test_dataset) if is_given else own_test(test_dataset)

    def read_loader(batches: Batches) -> Any:
        # The trainer resets this to its own function after reading the loader.
        trainer.gather_function = gathered
        # batch_eval_metrics needs to know the last batch, and only Accelerate's loader tells.
        return DataLoaderShard(_Items(batches, trainer), batch_size=1, collate_fn=_as_it_is)

    def gathered(values: Any) -> Any:
        return _gathered(trainer.accelerator, values, is_padding=is_padding)

    def step(model: Any, inputs: Any, num_items_in_batch: Any = None, **options: Any) -> Any:
        weight = weight_of(inputs)
        # With this number, Transformers' loss is a mean over the tokens of all ranks.
        is_mean = num_items_in_batch is None or not weight
        with weighted_loop() as loop:
            loop.given(weight if is_mean else 1)
            return own_step(model, inputs, num_items_in_batch, **options)

    def predict(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        nonlocal is_padding
        is_padding = not weight_of(inputs)
        return own_prediction(model, inputs, *args, **options)

    trainer.get_train_dataloader = train_loader
    trainer.get_eval_dataloader = eval_loader
    trainer.get_test_dataloader = test_loader
    trainer.training_step, trainer.prediction_step = step, predict
    weigh_backward(trainer.accelerator)


class _Items(IterableDataset[Any]):
    """A data set that yields a shard's batches as its items."""

    def __init__(self, batches: Batches, trainer: Trainer) -> None:
        self._batches = batches
        self._trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if not weight_of(batch):
                self._remove_labels(batch)
            yield batch

    def _remove_labels(self, batch: Any) -> None:
        """Remove the labels of a padding batch, so that Transformers counts none of its tokens."""
        counts = self._trainer.model_accepts_loss_kwargs or self._trainer.compute_loss_func
        if counts and "labels" in batch:
            # In place: a batch's weight is found by its tensors.
            batch["labels"].fill_(_NO_LABEL)


class _TrainingBatches(_Items):
    """Yields training batches, from the checkpoint's position on."""

    def __init__(self, batches: Batches, trainer: Trainer, *, is_resumed: bool) -> None:
        super().__init__(batches, trainer)
        self._is_resumed = is_resumed
        self.num_batches = epoch_of(batches)

    def __iter__(self) -> Iterator[Any]:
        if not self._is_resumed:
            yield from super().__iter__()
            return
        self._is_resumed = False
        # The shard skips trained batches itself: give Transformers placeholders to skip.
        skipped = self._skipped()
        yield from repeat(None, skipped)
        is_over = True
        for batch in super().__iter__():
            is_over = False
            yield batch
        if is_over and not skipped:
            # The checkpoint was made after an epoch's last batch: begin the next epoch.
            yield from super().__iter__()

    def _skipped(self) -> int:
        """Return how many batches Transformers takes and skips at the start of this epoch."""
        arguments = self._trainer.args
        if arguments.ignore_data_skip:
            return 0
        per_step: int = arguments.gradient_accumulation_steps
        if self.num_batches is None:
            steps = arguments.max_steps
        else:
            steps = max(-(-self.num_batches // per_step), 1)
        return int(self._trainer.state.global_step % steps) * per_step


class _TrainingLoader(DataLoader[Any]):
    """A loader with the shard's length, if known: Transformers derives epochs from it."""

    def __init__(self, batches: _TrainingBatches) -> None:
        super().__init__(batches, batch_size=1, collate_fn=_as_it_is)
        self._num_batches = batches.num_batches

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("a stream of unknown length")
        return self._num_batches


def _gathered(accelerator: Accelerator, values: Any, *, is_padding: bool) -> Any:
    """Return the rows of all ranks, which may have different numbers of rows.

    Args:
        accelerator: the trainer's accelerator.
        values: tensors of shape (rows, …), also in lists, tuples and dicts.
        is_padding: whether this rank has only a padding row.
    """

    def gathered(tensor: torch.Tensor) -> Any:
        own = 0 if is_padding else len(tensor)
        counts = accelerator.gather(torch.tensor([own], device=tensor.device)).tolist()
        rows = accelerator.gather(accelerator.pad_across_processes(tensor, dim=0))
        parts = zip(rows.chunk(len(counts)), counts, strict=True)
        return torch.cat([part[:count] for part, count in parts])

    return recursively_apply(gathered, values)


def _as_it_is(items: list[Any]) -> Any:
    [batch] = items
    return batch


def _check(trainer: Trainer) -> None:
    evaluated = trainer.eval_dataset
    named = {"train_dataset": trainer.train_dataset, "eval_dataset": evaluated}
    if isinstance(evaluated, dict):
        named |= {f"eval_dataset[{name!r}]": each for name, each in evaluated.items()}
    for name, dataset in named.items():
        if isinstance(dataset, Shard):
            raise TypeError(
                f"{name} is a shard. Give the Trainer its batches: "
                f"{name}=get_dataset_shard({dataset.name!r}).iter_torch_batches(batch_size=…)"
            )
    if isinstance(trainer.train_dataset, Batches) and trainer.args.auto_find_batch_size:
        raise ValueError(
            "TrainingArguments(auto_find_batch_size=True): train_dataset is a shard's batches, "
            "whose size is set by iter_torch_batches(batch_size=…). Leave auto_find_batch_size out."
        )
