"""The files of a `TrainingState`, but for shards and what single ranks have of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from polytrain_torch.checkpoints.rank_parts import Differences, differences_of
from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely
from polytrain_torch.virtual_workers import current

MODEL_FILE = "model.pt"
_STATE_FILE = "state.pt"
_MODEL = "model"
"""The part that has a file of its own, `MODEL_FILE`."""

UNKNOWN = None
"""In place of the names of states that differ: the ranks' digests tell, once they are together."""


def write_state(
    directory: Path,
    parts: Mapping[str, Any],
    *,
    progress: Mapping[str, Any],
    found: Differences,
    sharded: Collection[str] = (),
    beside: Mapping[str, Any] | None = None,
    lacks_gradients: bool = False,
) -> None:
    """Write the state of rank 0.

    Args:
        directory: where to.
        parts: states of the parts that aren't in shards.
        progress: what the training function knows of its progress.
        found: which states differ between ranks.
        sharded: names of the parts that are in shards.
        beside: states of these parts that differ by rank.
        lacks_gradients: whether there are gradients that no optimizer has used.

    Raises:
        TypeError: a value isn't plain data, and couldn't be loaded safely.
    """
    virtual = current()
    others = {name: state for name, state in parts.items() if name != _MODEL}
    if _MODEL in parts:
        save_safely(parts[_MODEL], directory / MODEL_FILE)
    save_safely(
        {
            "parts": others,
            "has_model": _MODEL in parts,
            "sharded": sorted(sharded),
            "progress": progress,
            "beside": beside or {},
            "found": found,
            # What the bits of virtual workers depend on.
            "arithmetic": None if virtual is None else virtual.arithmetic(),
            "lacks_gradients": lacks_gradients,
        },
        directory / _STATE_FILE,
    )


def read_state(directory: Path) -> dict[str, Any]:
    """Read what `write_state` has written, except the model in a file of its own."""
    saved: dict[str, Any] = loaded(directory / _STATE_FILE)
    found = saved["found"]
    if found["names"] is UNKNOWN:
        files = [directory / digests_file(rank) for rank in range(found["ranks"])]
        saved["found"] = differences_of([*map(loaded, files)])
    return saved


def digests_file(rank: int) -> str:
    """Return the name of the file with the digests of a rank's states, in a part of its own."""
    return f"digests-{rank}.pt"


def read_model(directory: Path, saved: dict[str, Any]) -> None:
    """Add the model that has a file of its own, if there is one, to what `read_state` returned."""
    if saved["has_model"]:
        saved["parts"][_MODEL] = loaded(directory / MODEL_FILE)
