"""Notes the code files that a process has imported, and finds changed ones.

A zygote may serve several runs. Between them a user may edit modules beside the script, or
installed in editable mode: worker processes forked from earlier imports would run old code. Files
of installed distributions aren't noted: those are replaced as a whole.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from polytrain.functions.users_code import is_installed

_State = tuple[int, int] | None
"""Modification time and size of a file; None if it doesn't exist."""


class CodeFiles:
    """Files of modules outside installed distributions, with their states before the import.

    While it notes them it is the process's first import finder, and delegates to the others. So a
    file's state is read before its content, and an edit in between is noticed later.
    """

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        """File → its state before the import."""

        self._linked: set[str] = set()
        """Packages that are links in a directory of installed packages."""

    def __len__(self) -> int:
        return len(self._states)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the files of all modules that are imported meanwhile."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)

    def note_imported(self) -> None:
        """Note the files of modules that this process has already imported."""
        for name, module in list(sys.modules.items()):
            # Read `__dict__` directly: some modules import others on attribute access.
            with contextlib.suppress(AttributeError):
                self._note(name, object.__getattribute__(module, "__dict__").get("__spec__"))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module with the other finders, and note its file."""
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._note(name, spec)
                    return spec
        return None

    def are_current(self) -> bool:
        """Return whether all files are unchanged."""
        return all(_state(file) == state for file, state in self._states.items())

    def _note(self, name: str, spec: ModuleSpec | None) -> None:
        if spec is None or not spec.has_location or spec.origin is None:
            return
        top, _, below = name.partition(".")
        if is_installed(spec.origin):
            if not below and os.path.islink(os.path.dirname(spec.origin)):
                self._linked.add(top)
            if top not in self._linked:
                return
        file = os.path.abspath(spec.origin)
        while not os.path.exists(file) and file != os.path.dirname(file):
            # It is in an archive: note the archive.
            file = os.path.dirname(file)
        self._states.setdefault(file, _state(file))


def _state(file: str) -> _State:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
