"""Detects and explains problems of scripts in which `multiprocessing` spawns processes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator

from polytrain_plugins import Problem


def guard_problems() -> Iterator[Problem]:
    """Yield a problem if a script makes this call while a spawned process imports it.

    Such a process runs the whole script before its own work, so each would start a run.
    """
    imported = sys.modules.get("__mp_main__")
    # While the script runs, the module has only this name; afterwards it is also `__main__`. In
    # other processes it is an alias of the main module, which runpy, profilers, debuggers replace.
    is_spawned = imported is not None and imported.__name__ == "__mp_main__"
    if is_spawned and imported is not sys.modules["__main__"]:
        yield Problem(
            field="if __name__ == '__main__'",
            what="a process that multiprocessing has spawned imports this script, and would start "
            "the run again",
            remedy="Write `if __name__ == '__main__':` above the lines that make the trainer and "
            "call fit()",
        )


def explain_pickling(error: BaseException) -> None:
    """Add a note to an error of pickling objects that only the script's `__main__` defines."""
    text = str(error)
    is_pickling = isinstance(error, pickle.PicklingError | AttributeError) and "pickle" in text
    if is_pickling and any(part in text for part in ("__main__", "<locals>", "import of module")):
        error.add_note(
            "Processes of multiprocessing get functions and classes by name, and worker processes "
            "don't have the script's as their `__main__`. Move them into a module beside the "
            "script. A data loader whose processes are forked, torch's default, needs no names."
        )
