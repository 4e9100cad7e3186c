"""The files of a `TrainingState`, but for shards and what single ranks have of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from polytrain_torch.checkpoints.rank_parts import Differences, differences_of
from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely
from polytrain_torch.engine import MODEL_FILE
from polytrain_torch.virtual_workers import current

_STATE_FILE = "state.pt"
UNKNOWN = None
"""In place of the names of states that differ: the ranks' digests tell, once they are together."""

_APART = ("model",)
"""Parts that have a file of their own, `MODEL_FILE`."""


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
    apart = [name for name in _APART if name in parts]
    for name in apart:
        save_safely(parts[name], directory / MODEL_FILE)
    save_safely(
        {
            "parts": {name: state for name, state in parts.items() if name not in apart},
            "apart": apart,
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
    """Read what `write_state` has written, except the parts that have a file of their own."""
    saved: dict[str, Any] = loaded(directory / _STATE_FILE)
    found = saved["found"]
    if found["names"] is UNKNOWN:
        files = [directory / digests_file(rank) for rank in range(found["ranks"])]
        saved["found"] = differences_of([*map(loaded, files)])
    return saved


def digests_file(rank: int) -> str:
    """Return the name of the file with the digests of a rank's states, in a part of its own."""
    return f"digests-{rank}.pt"


def read_apart(directory: Path, saved: dict[str, Any]) -> None:
    """Add the parts that have a file of their own."""
    for name in saved["apart"]:
        saved["parts"][name] = loaded(directory / MODEL_FILE)
