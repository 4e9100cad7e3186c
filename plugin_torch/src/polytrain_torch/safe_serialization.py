"""Files that are loaded without running what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def loaded(file: Path) -> Any:
    """What `save_safely` has written, on the CPU."""
    return torch.load(file, weights_only=True, map_location="cpu")


def save_safely(state: Any, file: Path) -> None:
    """Write tensors and plain data.

    Raises:
        TypeError: it couldn't be loaded; nobody would notice that before a crash.
    """
    torch.save(state, file)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        raise TypeError(
            f"A checkpoint can't hold {', '.join(sorted(unsafe))}: torch.load(weights_only=True) "
            "would refuse it. Pass tensors, numbers, strings, lists and dicts of them; or allow "
            "it with torch.serialization.add_safe_globals."
        )
