"""The engine of a backend: it joins the framework's collective in a worker process, and trains."""

from __future__ import annotations

import hashlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, Union

from polytrain_plugins.errors import UnsupportedCapabilityError
from polytrain_plugins.shard import Shard
from polytrain_plugins.world import Member, Offer, World

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Model = TypeVar("Model")

Predictions: TypeAlias = Union["np.ndarray[Any, Any]", Mapping[str, "np.ndarray[Any, Any]"]]
"""An array whose first axis is the rows, or several such arrays by name."""

_PACKED = 5
"""Bytes in a number of `Engine.sum_over_ranks`, which is below 2 ** 40."""


class Session(Protocol):
    """What `Engine.train` gets from the core."""

    @property
    def world(self) -> World:
        """The attempt of this worker process."""

    @property
    def checkpoint(self) -> Path | None:
        """Directory to resume from, written earlier by `Engine.save`; None at the first attempt."""

    @property
    def scratch(self) -> Path:
        """A directory on the node's disk for this attempt. It is removed when the next attempt
        begins, or when the run ends, however it ends."""

    def report(self, *, step: int, metrics: Mapping[str, Any], model: Any = None) -> None:
        """Report a finished step, such as an epoch. Every rank calls it at every step.

        Args:
            step: Steps done, counted over the whole run: 1 after the first.
            metrics: Plain numbers by name.
            model: What `Engine.save` takes. The core decides at which steps, and on which ranks,
                it is saved.

        Raises:
            TypeError: the step isn't a whole number, or a metric can't be stored.
            ValueError: the step was done before, perhaps in an earlier attempt.
        """


class Engine(ABC, Generic[Model]):
    """One per worker process. The core runs, on every rank:

        with engine.offering(me) as offer:
            …all offers are gathered, every rank gets the roster…
            with engine.joined(world):
                engine.train(…) or the user's training function

    Both blocks are left at a normal end, after every rank has finished. After a failure the process
    is killed instead, so no clean-up is needed.
    """

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        """Offer what the other ranks must know: an address, a service. By default nothing.

        Listen with `listening_socket`, or hold a port (`held_port`) until the framework binds it.
        """
        yield Offer()

    @contextmanager
    @abstractmethod
    def joined(self, world: World) -> Iterator[None]:
        """Join the collective. At the end leave it, and undo all changes in the process."""
        yield

    @abstractmethod
    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        """The sums of the ranks' numbers, by the framework's own collective operation.

        Called on every rank right after `joined` was entered. The core sums up ones, and fails
        unless the sum is `world.size`: otherwise each worker would train its own model on its part
        of the data. It also sums up the ranks' rows, and compares them with the data set's.

        Args:
            values: the same number of them on every rank; from 0, and below 2 ** 40.
            world: the attempt.
        """

    def gather_over_ranks(self, piece: bytes, world: World, *, call: str) -> list[bytes]:
        """Every rank's bytes, by rank, by the framework's own collective operation.

        `polytrain.collective` calls it on every rank, at any place of a training function. By
        default it adds up numbers with `sum_over_ranks`, of which each rank contributes its own.

        Args:
            piece: this rank's bytes; every rank's may have another length.
            world: the attempt, of several ranks.
            call: what the user calls, for an error if ranks make different calls.
        """
        own = world.me.rank
        lengths = self.sum_over_ranks(
            [len(piece) if rank == own else 0 for rank in range(world.size)], world
        )
        numbers: list[int] = []
        for rank, length in enumerate(lengths):
            padded = (piece if rank == own else b"").ljust(-(-length // _PACKED) * _PACKED, b"\0")
            numbers += (
                int.from_bytes(padded[at : at + _PACKED], "big")
                for at in range(0, len(padded), _PACKED)
            )
        summed = b"".join(
            number.to_bytes(_PACKED, "big") for number in self.sum_over_ranks(numbers, world)
        )
        pieces, start = [], 0
        for length in lengths:
            pieces.append(summed[start : start + length])
            start += -(-length // _PACKED) * _PACKED
        return pieces

    def adapt(self, shard: Shard) -> Any:
        """The shard that a training function gets from `get_dataset_shard`: by default the same."""
        return shard

    def train(self, shards: Mapping[str, Shard], session: Session) -> Model:
        """Train from the backend's options alone, for a backend that declares `declarative`.

        Returns:
            The model after the last step. None only where it isn't saved any more: on a rank that
            writes no checkpoints (`Capabilities.checkpoint`), or if the last report's was saved.
        """
        raise UnsupportedCapabilityError(
            f"{type(self).__name__} can't train from options alone: pass train_loop_per_worker."
        )

    @abstractmethod
    def save(self, model: Model, directory: Path) -> None:
        """Write the model as plain files into an empty directory.

        If it raises the system's error of a full disk or quota, this rank alone calls it again,
        with another directory. If ranks save together, raise another error.
        """

    @abstractmethod
    def load(self, directory: Path) -> Model:
        """Read what `save` wrote, without running any stored code."""

    def digests(self, model: Model | None) -> Mapping[str, str]:
        """A digest of each part of the state with which training continues, by its name.

        `RunConfig(digests=…)` asks rank 0 for them at reports. Equal states have equal digests in
        all processes. By default they are those of the files that `save` writes.

        Args:
            model: what the report was given; None in a training function.
        """
        if model is None:
            return {}
        with tempfile.TemporaryDirectory(prefix="digests-") as name:
            directory = Path(name)
            self.save(model, directory)
            return {
                file.relative_to(directory).as_posix(): _digest_of(file)
                for file in sorted(directory.rglob("*"))
                if file.is_file()
            }

    def model_columns(
        self, directory: Path, columns: Sequence[str], **options: Any
    ) -> Sequence[str] | None:
        """The columns that the model in a directory reads; None for all, the default.

        Called before predictions start, in the calling process. Columns that the data lack are
        named to the user; columns that the model doesn't read aren't read at all.

        Args:
            directory: with the files that `save` wrote.
            columns: those of the data.
            options: the user's, as in `predict`.
        """
        return None

    def predictor(self, directory: Path, **options: Any) -> Callable[[pa.Table], Predictions]:
        """What predicts tables with the model in a directory: by default `load`, then `predict`.

        Called once in each process that predicts. A backend whose model needs the user's code
        overrides this one instead of `predict`.

        Args:
            directory: with the files that `save` wrote.
            options: the user's, as in `predict`.

        Raises:
            CheckpointError: the files aren't a model's, or need code that isn't here.
        """
        return partial(self.predict, self.load(directory), **options)

    def predict(self, model: Model, table: pa.Table, **options: Any) -> Predictions:
        """Predict rows, each independently, for a backend that declares `predictive`.

        Args:
            model: what `load` returned.
            table: the rows, with the columns of `model_columns` in their order, or all.
            options: the user's, for the framework's own method.

        Returns:
            An array whose first axis is the rows, in their order; or several, by name.

        Raises:
            ValueError: a column that the model needs is missing.
        """
        raise UnsupportedCapabilityError(
            f"{type(self).__name__} can't predict: use result.load_model() and its own method."
        )


def _digest_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]
