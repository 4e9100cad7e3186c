"""What the training functions of a finished run have returned, for its `Result`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polytrain.errors import ReturnValueError
from polytrain.functions.return_values import Returned, from_bytes
from polytrain.storage.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """Encoded values, which are read from the storage and decoded when they are asked for."""

    values: Sequence[Returned | None] = ()
    """Each rank's, of a run that has just ended; empty if no rank has returned anything."""

    location: Location | None = None
    """The run, if its values are read from there."""

    file: str = ""
    may_unpickle: bool = False

    def of_rank(self, rank: int) -> Any:
        """What this rank has returned; None if nothing.

        Raises:
            ReturnValueError: it can't be read.
            OSError: the storage can't be read.
        """
        values = self._all()
        return self._decoded(rank, values[rank]) if values else None

    def of_all(self) -> tuple[Any, ...]:
        """What each rank has returned.

        Raises:
            ReturnValueError: one of them can't be read.
            OSError: the storage can't be read.
        """
        return tuple(self._decoded(rank, each) for rank, each in enumerate(self._all()))

    def _decoded(self, rank: int, returned: Returned | None) -> Any:
        if returned is None:
            return None
        return returned.value(rank=rank, may_unpickle=self.may_unpickle)

    def _all(self) -> Sequence[Returned | None]:
        if self.location is None:
            return self.values
        try:
            return from_bytes(self.location.open().read(self.file))
        except (FileNotFoundError, ValueError) as error:
            raise ReturnValueError(
                f"{self.file} in {self.location.address} can't be read ({error}): it has what the "
                "training functions returned."
            ) from error
