"""Finds out whether the installed torch is built for GPUs, without importing it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from polytrain_plugins import Problem

_VALUE = r"^{name}\b[^=\n]*=\s*['\"]?([^'\"\n]*)"


def cpu_build_problem() -> Problem | None:
    """Return a problem if workers with GPUs can't use this environment's torch."""
    version = version_for_cpus_only()
    if version is None:
        return None
    return Problem(
        field="ScalingConfig.use_gpu",
        what=f"it is True, and torch {version} in this environment is built for CPUs only",
        remedy="Install a build of torch for GPUs in its place, or use use_gpu=False",
    )


def version_for_cpus_only() -> str | None:
    """Return the version of the installed torch if it can't use GPUs; None if it can.

    It is also None if torch isn't installed, or its build is unknown.
    """
    try:
        spec = find_spec("torch")
    except ValueError:  # a module without a spec stands in for torch
        return None
    for directory in (spec and spec.submodule_search_locations) or ():
        try:
            text = Path(directory, "version.py").read_text()
        except OSError:
            continue
        return version_of_cpu_build(text)
    return None


def version_of_cpu_build(text: str) -> str | None:
    """Return the version that `torch/version.py` names if it is built for CPUs only, else None."""
    version, cuda, hip = (
        re.search(_VALUE.format(name=name), text, re.MULTILINE)
        for name in ("__version__", "cuda", "hip")
    )
    if version is None or cuda is None or cuda[1] != "None":
        return None
    return version[1] if hip is None or hip[1] == "None" else None
