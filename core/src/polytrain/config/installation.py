"""Libraries that a backend needs and that aren't installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from polytrain_plugins import Backend, Problem
from polytrain_plugins.installation import install_command


def installation_problems(backend: Backend) -> Iterator[Problem]:
    """Yield the modules that a backend needs and that can't be found, without importing any."""
    for module, command in missing_modules(backend.requires).items():
        yield Problem(
            field="backend",
            what=f"the {backend.name} backend needs {module}, which is not installed",
            remedy=f"Install it with: {install_command(command)}",
        )


def missing_modules(required: Mapping[str, str]) -> dict[str, str]:
    """Return those of `Backend.requires` that can't be found, without importing any."""
    return {
        module: command
        for module, command in required.items()
        if importlib.util.find_spec(module) is None
    }
