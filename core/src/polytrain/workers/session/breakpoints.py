"""What `breakpoint()` does in a worker process, which has no terminal."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn


def explain_breakpoints() -> None:
    """Let `breakpoint()` say how to debug, unless the user's PYTHONBREAKPOINT says what it does."""
    chosen = os.environ.get("PYTHONBREAKPOINT", "")
    # Ray sets the variable to a debugger of its own, which works in Ray's processes only.
    if not chosen or chosen.startswith("ray."):
        sys.breakpointhook = _explain


def _explain(*arguments: Any, **named: Any) -> NoReturn:
    raise RuntimeError(
        "breakpoint() needs a terminal, and a worker process has none. Train in this process with "
        "ScalingConfig(num_workers=0), where breakpoints work, or let a debugger attach to one "
        "rank: debugpy.listen(5678); debugpy.wait_for_client()"
    )
