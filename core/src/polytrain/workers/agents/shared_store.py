"""Shares bytes of the driver with all agents of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from polytrain.data.shards.shared_memory import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedBytes:
    """Shared bytes that an agent has opened."""

    descriptor: int
    extent: Extent | None = None
    """The extent in the descriptor's memory; None for all of it."""

    kept: Any = None
    """An object that must exist while the memory is used, such as one of Ray's."""


class SharedBytes(Protocol):
    """Bytes of the driver that all agents can read."""

    def open(self) -> OpenedBytes:
        """Open the bytes in an agent."""

    def fetch(self) -> object:
        """Bring the bytes to this node, in an agent. They stay while what is returned exists."""

    def close(self) -> None:
        """Free the bytes, in the driver."""


class SharedStore(Protocol):
    """Stores bytes of the driver for all agents."""

    @property
    def reference_type(self) -> type | tuple[type, ...]:
        """Types in a data set that must be sent separately."""

    def share(self, content: pa.Buffer) -> SharedBytes:
        """Put bytes where all agents can read them."""
