"""The points at which satellites attach to the kernel: for each its module, and what it is for.

A satellite reads a run, talks to another product or imitates another interface. Its folder may be
missing: what it does unasked is then left out (`has`), and what a user asks of it is an error that
names it. A module is imported when it is first used, so that a run that doesn't need it starts
sooner.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polytrain.prediction import predict as prediction
    from polytrain.ray_names import callbacks, missing
    from polytrain.trackers import attached as trackers
    from polytrain.validation import coordinator as validation
    from polytrain.view.page import ending as page
    from polytrain.view.progress import display as progress

__all__ = [
    "callbacks",
    "has",
    "missing",
    "page",
    "prediction",
    "progress",
    "trackers",
    "validation",
]

_POINTS = {
    "callbacks": ("polytrain.ray_names.callbacks", "RunConfig(callbacks=…)"),
    "missing": ("polytrain.ray_names.missing", "A sentence on a name of Ray Train's"),
    "page": ("polytrain.view.page.ending", "The page of a run"),
    "prediction": ("polytrain.prediction.predict", "Result.predict"),
    "progress": ("polytrain.view.progress.display", "RunConfig(progress=…)"),
    "trackers": ("polytrain.trackers.attached", "RunConfig(track=…)"),
    "validation": ("polytrain.validation.coordinator", "ValidationConfig"),
}


def has(point: str) -> bool:
    """Whether the satellite of a point is there."""
    folder = _folder(_POINTS[point][0])
    try:
        import_module(folder)
    except ModuleNotFoundError as error:
        if error.name != folder:
            raise
        return False
    return True


def __getattr__(point: str) -> ModuleType:
    if point not in _POINTS:
        raise AttributeError(f"module {__name__!r} has no attribute {point!r}")
    module, purpose = _POINTS[point]
    if not has(point):
        raise ModuleNotFoundError(
            f"{purpose} needs {_folder(module)}, which this installation of polytrain lacks. "
            "Install polytrain-core again.",
            name=_folder(module),
        )
    return import_module(module)


def _folder(module: str) -> str:
    return ".".join(module.split(".")[:2])
