"""Checks the transform from a user's rows to the rows that a model was trained on.

A checkpoint holds its fingerprint, not its code: the caller of a prediction passes it, or rows that
it has been applied to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polytrain.checkpoint.manifest import Manifest
from polytrain.data.read.transforms import wants_generator
from polytrain.functions.code_fingerprint import code_fingerprint, python_version
from polytrain_plugins import Problem

logger = logging.getLogger(__name__)

_OR_TRANSFORMED = "pass transformed=True with rows that are as the model was trained on"


@dataclass(frozen=True, slots=True, kw_only=True)
class WithKeys:
    """A transform whose result also has the key columns."""

    transform: Callable[..., Any]
    keys: tuple[str, ...]

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        # Copy the keys: a transform may change arrays in place.
        kept = {name: batch[name].copy() for name in self.keys if name in batch}
        result = self.transform(batch)
        return {**kept, **result} if isinstance(result, Mapping) else result


def with_keys(transform: Any, keys: Collection[str]) -> Any:
    """Return a transform whose result has the key columns; None without a transform."""
    if not callable(transform) or not keys:
        return transform
    return WithKeys(transform=transform, keys=tuple(keys))


def transform_problems(
    manifest: Manifest | None, transform: Any, *, transformed: Any
) -> Iterator[Problem]:
    """Yield a problem if the model wouldn't get such rows as it was trained on.

    Args:
        manifest: manifest of the checkpoint; None if a user has made its directory.
        transform: the function that the user passed.
        transformed: whether the user says that the rows are already transformed.
    """
    trained_with = None if manifest is None else manifest.transform
    if transform is None:
        if trained_with is not None and not transformed:
            yield Problem(
                field="transform",
                what="the model was trained on rows that a function had changed, "
                "DataConfig(transform=…), and these rows would reach it as they are",
                remedy=f"Pass the same function here, transform=…, or {_OR_TRANSFORMED}",
            )
        return
    if transformed:
        yield Problem(
            field="transformed",
            what="it says that the rows need no transform, and there is one",
            remedy="Pass one of the two",
        )
    elif not callable(transform):
        yield Problem(
            field="transform", what=f"{transform!r} is not a function", remedy="Pass a function"
        )
    elif wants_generator(transform):
        yield Problem(
            field="transform",
            what="it changes rows at random, and so would the predictions be",
            remedy=f"Leave it out, and {_OR_TRANSFORMED}",
        )
    elif manifest is not None:
        yield from _of_another_code(manifest, transform)


def _of_another_code(manifest: Manifest, transform: Callable[..., Any]) -> Iterator[Problem]:
    if manifest.transform is None:
        yield Problem(
            field="transform",
            what="the model was trained without one",
            remedy="Leave it out, and pass rows with the columns of the training data",
        )
        return
    python = ".".join(manifest.versions.get("python", "").split(".")[:2])
    if python != python_version():
        logger.warning(
            "The model was trained with Python %s, and this is %s: whether the transform is the "
            "one of the training can't be checked.",
            python,
            python_version(),
        )
    elif manifest.transform != code_fingerprint(transform):
        yield Problem(
            field="transform",
            what="its code differs from that of the function that the model was trained with, or a "
            "value that it uses does",
            remedy=f"Pass that function, or {_OR_TRANSFORMED}",
        )
