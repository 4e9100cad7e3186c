"""Runs a script that makes its own process group, as `torchrun` does.

The driver reads the script, so that every node and every attempt runs the same text.
"""

from __future__ import annotations

import linecache
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from polytrain import get_context
from polytrain.extension import scratch_directory
from polytrain_plugins import changed_environment


class ScriptFailedError(RuntimeError):
    """The script has exited with a code other than 0."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script, or a module as for `python -m`, that workers run as their training function."""

    name: str
    """The script's path, or the module's name, as the user gave it."""

    path: Path | None
    """The script's path; None for a module."""

    source: bytes
    """The script's content; empty for a module."""

    directory: str
    """First entry of `sys.path`: the script's directory, or for a module the working directory."""

    args: tuple[str, ...]
    max_restarts: int
    """Maximum number of restarts of the run; below 0 for any number."""

    def __call__(self) -> None:
        """Run the script or module to its end.

        Raises:
            ScriptFailedError: it exited with a code other than 0.
        """
        with changed_environment(_torchrun_variables(self.max_restarts)), _restored():
            sys.argv = [self.name, *self.args]
            sys.path.insert(0, self.directory)
            try:
                if self.path is None:
                    runpy.run_module(self.name, run_name="__main__", alter_sys=True)
                else:
                    self._run_file(self.path)
            except SystemExit as exit:
                if exit.code not in (None, 0):
                    raise ScriptFailedError(
                        f"{self.name} exited with the code {exit.code}"
                        if isinstance(exit.code, int)
                        else f"{self.name} exited: {exit.code}"
                    ) from exit

    def _run_file(self, path: Path) -> None:
        # Without runpy, which would read the file again, and drop the script's globals at its end:
        # functions that run at the process's exit may need them.
        module = ModuleType("__main__")
        module.__file__ = str(path)
        module.__builtins__ = __builtins__  # type: ignore[attr-defined]  # as Python does
        text = self.source.decode(errors="replace")
        # For tracebacks: the file may be missing on this node, or have changed.
        linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
        # Pickle looks there for the script's classes.
        sys.modules["__main__"] = module
        exec(compile(self.source, str(path), "exec", dont_inherit=True), module.__dict__)


def _torchrun_variables(max_restarts: int) -> dict[str, str]:
    """Return the variables that torchrun sets, besides those of every attempt (see `engine`)."""
    context = get_context()
    me = context.world.me
    return {
        "GROUP_WORLD_SIZE": str(me.node_count),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(me.rank),
        "ROLE_WORLD_SIZE": str(me.world_size),
        "TORCHELASTIC_RESTART_COUNT": str(context.get_attempt()),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts if max_restarts >= 0 else sys.maxsize),
        "TORCHELASTIC_RUN_ID": context.get_experiment_name(),
        # Rank 0 serves the store at MASTER_PORT already, and all ranks connect to it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # A function with torch's decorator `record` writes its exception there.
        "TORCHELASTIC_ERROR_FILE": str(scratch_directory() / "error.json"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


@contextmanager
def _restored() -> Iterator[None]:
    """Restore `sys.argv`, `sys.path` and `__main__` after a block of code."""
    argv, path, main = sys.argv, [*sys.path], sys.modules["__main__"]
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
