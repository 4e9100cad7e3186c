"""Pickles values that contain users' code; the code keeps the name of its file, and its lines."""

from __future__ import annotations

import io
import linecache
import os
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle


def dumps(value: Any) -> bytes:
    """Pickle a value. `pickle.loads` reads it.

    Raises:
        Exception: it can't be pickled. An object's methods may raise anything.
    """
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # noqa: TID251  # it has no types
    """A `cloudpickle.Pickler` whose code objects keep `co_filename`.

    Since 3.1.3 cloudpickle writes "<dynamic-code>" there. Tracebacks, stacks and readers of a
    function's source (`tf.function`, `torch.jit.script`) then find neither file nor line.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # Use one string for all code of a file: pickle writes the same object only once.
        self._sources: dict[str, str | None] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, CodeType):
            return super().reducer_override(value)
        make, arguments = self.dispatch_table[CodeType](value)
        file = value.co_filename
        if file not in self._sources:
            self._sources[file] = _source_only_here(file)
        return restored_code, (make, arguments, file, self._sources[file])


def restored_code(
    make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str, source: str | None
) -> CodeType:
    """Return a code object with the name of its file; pickles call this.

    Args:
        make: a function that returns the code object.
        arguments: the arguments of `make`.
        file: the file's name.
        source: the source, if the process that pickled the code had no such file.
    """
    if source is not None:
        # Without a modification time, `linecache` never compares the entry with a file.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return make(*arguments).replace(co_filename=file)


def _source_only_here(file: str) -> str | None:
    """Return the source of a notebook's cell, or of code that was typed at a prompt."""
    return None if os.path.exists(file) else "".join(linecache.getlines(file)) or None
