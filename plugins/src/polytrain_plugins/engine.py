"""The trainer half of a backend: it brings up the framework's own distribution, and trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from polytrain_plugins.errors import UnsupportedCapabilityError
from polytrain_plugins.shard import Shard
from polytrain_plugins.world import Member, Offer, World

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Model = TypeVar("Model")


class Session(Protocol):
    """What the core hands to `Engine.train`."""

    @property
    def world(self) -> World:
        """The attempt that this trainer is in."""

    @property
    def checkpoint(self) -> Path | None:
        """Directory to resume from, written earlier by `Engine.save`; None at the first attempt."""

    @property
    def scratch(self) -> Path:
        """A directory on the node's disk for this attempt alone, removed when the next begins, or
        when the run ends, however it ends."""

    def report(self, *, step: int, metrics: Mapping[str, Any], model: Any = None) -> None:
        """Report a finished round or epoch. Every rank calls it at every step.

        Args:
            step: Rounds or epochs done, counted over the whole run: 1 after the first.
            metrics: Plain numbers by name.
            model: What `Engine.save` takes. The core decides at which steps, and on which ranks,
                it is saved.
        """


class Engine(ABC, Generic[Model]):
    """One per trainer process and attempt. The core runs, on every rank:

        with engine.offering(me) as offer:
            …all offers are gathered, everyone gets the roster…
            with engine.joined(world):
                engine.train(…) or the user's training function

    Both blocks are left on a normal end, after every rank has finished. A failure kills the
    process instead: nothing needs to be unwound.
    """

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        """Make what the other ranks must know: an address, a service. Nothing by default.

        Hold a port (`polytrain_plugins.ports.HeldPort`) until the framework binds it.
        """
        yield Offer()

    @contextmanager
    @abstractmethod
    def joined(self, world: World) -> Iterator[None]:
        """Enter the collective; at the end leave it, and undo what was changed in the process."""
        yield

    @abstractmethod
    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        """The sums of the ranks' numbers, by a collective operation of the framework's own.

        Called on every rank right after `joined` was entered. The core sums up ones, and refuses to
        train when that isn't `world.size`: such a run would train each worker on its own part of
        the data. It sums up the rows that the ranks have, and compares them with the data set's.

        Args:
            values: the same number of them on every rank; from 0, and below 2 ** 40.
            world: the attempt.
        """

    def adapt(self, shard: Shard) -> Any:
        """The shard as `get_dataset_shard` gives it to a training function: itself by default."""
        return shard

    def train(self, shards: Mapping[str, Shard], session: Session) -> Model:
        """Train from the backend's options alone, for a backend that declares `declarative`."""
        raise UnsupportedCapabilityError(
            f"{type(self).__name__} has no training loop of its own: pass a training function."
        )

    @abstractmethod
    def save(self, model: Model, directory: Path) -> None:
        """Write the model as plain files into an empty directory."""

    @abstractmethod
    def load(self, directory: Path) -> Model:
        """Read what `save` wrote, without executing anything that is stored there."""

    def predict(self, model: Model, table: pa.Table, **options: Any) -> np.ndarray[Any, Any]:
        """Predict rows, each by itself, for a backend that declares `predictive`.

        Args:
            model: what `load` returned.
            table: the rows; columns that the model doesn't know are left alone.
            options: the user's, as for the framework's own method.

        Returns:
            An array whose first axis is the rows, in their order.

        Raises:
            ValueError: a column that the model needs isn't there.
        """
        raise UnsupportedCapabilityError(
            f"{type(self).__name__} can't predict: use result.load_model() and its own method."
        )
