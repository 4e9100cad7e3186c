"""The import path of a node's worker processes. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence


def import_path(
    driver: Sequence[str], *, here: Sequence[str], variable: str, is_same_environment: bool
) -> tuple[str, ...]:
    """Return the driver's path, with the node's own entries.

    A Ray job's `runtime_env` gives a node's processes further modules: through `PYTHONPATH`
    (`working_dir`, `py_modules`), or through a virtual environment (`pip`).

    Args:
        driver: the driver's `sys.path`.
        here: the `sys.path` of the process that starts worker processes on the node.
        variable: its `PYTHONPATH`.
        is_same_environment: whether it has the driver's Python environment (`sys.prefix`).

    Returns:
        The `sys.path` of a worker process, each entry once.
    """
    named = [entry for entry in variable.split(os.pathsep) if entry]
    own = [entry for entry in here if entry and not _is_rays(entry)]
    first = [entry for entry in named if entry not in driver]
    if not is_same_environment:
        # The node's packages come first: the driver's may have other versions.
        first = [*first, *own]
    return tuple(dict.fromkeys([*first, *driver, *own]))


def _is_rays(entry: str) -> bool:
    """Return whether an entry is for Ray's own worker processes, which shadows user packages."""
    return entry.endswith("thirdparty_files") or entry.endswith("ray/_private/workers")
