"""PEFT's models. Their checkpoints have the adapters alone: not the frozen parameters, nor buffers.

Training changes some buffers (BatchNorm's statistics), so these are written beside the adapters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely

_FILE = "buffers.pt"


def is_adapted(model: Any) -> bool:
    """Whether a model, or another part of a training state, is a model of PEFT."""
    # Whoever has one has imported PEFT. Another thread may be importing it just now.
    return isinstance(model, getattr(sys.modules.get("peft"), "PeftModel", ()))


def without_frozen(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a PEFT model's state without its frozen parameters, which are nearly all of it."""
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, each in parameters if not each.requires_grad}
    return {name: each for name, each in state.items() if name not in frozen}


def write_buffers(model: Any, state: Mapping[str, Any], directory: Path) -> None:
    """Write the buffers in a PEFT model's state, if it has any."""
    names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    buffers = {name: each for name, each in state.items() if name in names}
    if buffers:
        save_safely(buffers, directory / _FILE)


def load_buffers(model: Any, directory: Path) -> None:
    """Load the buffers that `write_buffers` has written."""
    if (directory / _FILE).exists():
        model.load_state_dict(loaded(directory / _FILE), strict=False)
