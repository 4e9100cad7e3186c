"""Where the worker processes of a node look for modules. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence


def import_path(
    driver: Sequence[str], *, here: Sequence[str], variable: str, is_same_environment: bool
) -> tuple[str, ...]:
    """The driver's path, and what the node has besides.

    A Ray job's `runtime_env` gives a node's processes modules of its own: by `PYTHONPATH`
    (`working_dir`, `py_modules`), or in a virtual environment of its own (`pip`).

    Args:
        driver: the driver's `sys.path`.
        here: the `sys.path` of the process that starts worker processes on the node.
        variable: its `PYTHONPATH`.
        is_same_environment: whether it has the driver's Python environment (`sys.prefix`).

    Returns:
        What a worker process's `sys.path` is to be: each entry once.
    """
    named = [entry for entry in variable.split(os.pathsep) if entry]
    own = [entry for entry in here if entry and not _is_rays(entry)]
    first = [entry for entry in named if entry not in driver]
    if not is_same_environment:
        # Its packages come before the driver's, which may be of other versions.
        first = [*first, *own]
    return tuple(dict.fromkeys([*first, *driver, *own]))


def _is_rays(entry: str) -> bool:
    """Whether it is for Ray's own worker processes: they shadow packages of the user's."""
    return entry.endswith("thirdparty_files") or entry.endswith("ray/_private/workers")
