"""Imports optional libraries, with clear errors, and gives imported ones this process's rank."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from polytrain_plugins import Member

_OLDEST = {
    "lightning": (
        (2, 6, 6),
        "of the releases before it, two had malicious code in them, and all can run code from a "
        "checkpoint in spite of weights_only",
    )
}
"""Library → (oldest version that may be used, reason)."""


@contextmanager
def needed(library: str) -> Iterator[None]:
    """Guard a block that imports a library.

    Raises:
        ModuleNotFoundError: it isn't installed; the message has the command that installs it.
        ImportError: the installed version is too old.
    """
    # Before the import, which would run malicious code.
    _refuse_older(library)
    try:
        yield
    except ModuleNotFoundError:
        if find_spec(library) is not None:
            raise
        raise ModuleNotFoundError(
            f"polytrain_torch.{library} needs {library}, which isn't installed: "
            f"pip install {_requirement(library)}",
            name=library,
        ) from None


def _refuse_older(library: str) -> None:
    if library not in _OLDEST:
        return
    oldest, why = _OLDEST[library]
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:
        return
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < oldest:
        raise ImportError(
            f"{library} {version} is installed, and polytrain_torch.{library} needs "
            f"{'.'.join(map(str, oldest))} or newer: {why}. Install it: "
            f"pip install {_requirement(library)}",
            name=library,
        )


def _requirement(library: str) -> str:
    """Return a library's requirement for pip."""
    if library not in _OLDEST:
        return library
    return f"'{library}>={'.'.join(map(str, _OLDEST[library][0]))}'"


def give_rank(me: Member) -> None:
    """Correct the rank that libraries note when they are imported, from variables.

    A worker process that is forked from one with these libraries had no rank by then.
    """
    for module, rank in (
        ("lightning_utilities.core.rank_zero", me.rank),
        ("torchmetrics.utilities.prints", me.local_rank),
    ):
        function: Any = getattr(sys.modules.get(module), "rank_zero_only", None)
        if hasattr(function, "rank"):
            function.rank = rank
