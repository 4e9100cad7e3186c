"""What tests of the states that ranks keep have in common. Importing it imports no torch."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytrain.extension import KeptState, KeptStates, Place, StateWriter

if TYPE_CHECKING:
    import torch


class Session:
    """A rank's session, to which nothing is sent."""

    can_keep = True
    copies: Any = None
    reads_checkpoint = 0
    kept: KeptStates | None = None
    writer: StateWriter
    why_not = ""

    def place(self) -> Place:
        return Place(step=1, metrics={}, positions={})

    def keep(self, writer: StateWriter, *, capacity: int, size: int) -> KeptStates:
        self.writer = writer
        self.kept = KeptStates.new(capacity)
        return self.kept

    def keep_nothing(self, why: str) -> None:
        self.why_not = why


def small_state(
    rank: str, own: Mapping[str, Any] | None, *, point: int, is_forecast: bool = False
) -> KeptState:
    """A small state with random numbers of a rank, and with what it has alone if that is known."""
    from polytrain_torch.survivors.kept_by_rank import LENGTHS

    small: dict[str, Any] = {} if own is None else {"own": own}
    if not is_forecast:
        small |= {"places": {}, "progress": {}, "groups": {}, "parts": {}, "sample": None}
    pieces = [rank.encode(), b"", b"", b"", pickle.dumps(small) if small else b""]
    content = b"".join([LENGTHS.pack(*map(len, pieces)), *pieces])
    return KeptState(point=point, is_forecast=is_forecast, content=content)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of a model's and its optimizer's tensors as they are now, on the CPU."""
    found = _by_name(model.state_dict(), optimizer.state_dict()["state"])
    return {name: each.detach().cpu().clone() for name, each in found.items()}


def written(directory: Path) -> dict[str, torch.Tensor]:
    """The same of a state that was written."""
    import torch

    parts = torch.load(directory / "state.pt")["parts"]
    return _by_name(torch.load(directory / "model.pt"), parts["optimizer"]["state"])


def _by_name(
    model: Mapping[str, torch.Tensor], optimizer: Mapping[int, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    its = {f"{n} {name}": each for n, state in optimizer.items() for name, each in state.items()}
    return {**model, **its}
