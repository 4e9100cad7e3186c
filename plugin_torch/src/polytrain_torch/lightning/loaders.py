"""Wraps data loaders for Lightning. The run's checkpoints have their positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polytrain_torch.loaders.prepared import PreparedDataLoader


class PlacedLoader:
    """A loader whose position is in the run's checkpoint, not in Lightning's."""

    def __init__(self, loader: PreparedDataLoader) -> None:
        self._loader = loader

    @property
    def was_resized(self) -> bool:
        """Whether the first epoch has another length than the following ones."""
        return False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return {}: the run's checkpoint has the position. Lightning requires this method."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the empty state."""


class CountingLoader(PlacedLoader):
    """A loader whose length counts a resumed epoch from its start, as Lightning does."""

    def __init__(self, loader: PreparedDataLoader, *, taken: int) -> None:
        """
        Args:
            taken: number of batches that were taken of an epoch that a restart resumes, counted
                with the number of workers before it.
        """
        super().__init__(loader)
        self._length = loader.batches_left() + (taken if loader.is_under_way else 0)

    def __len__(self) -> int:
        return self._length

    @property
    def was_resized(self) -> bool:
        return self._length != len(self._loader)
