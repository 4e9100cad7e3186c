"""Loads the first save of a run as a restart would, so that what can't resume fails at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polytrain

Load = Callable[[Path], Any]
"""Returns the model of a checkpoint."""


class FirstSave:
    """The first checkpoint that a new run saves."""

    def __init__(self) -> None:
        self._load: Load | None = None
        self._context: Any = None

    def will(self, load: Load) -> None:
        """Remember how a restart of this run will load its checkpoint."""
        self._load, self._context = load, polytrain.get_context()

    def check(self, model: Any, directory: Path) -> None:
        """Load the first checkpoint once. All ranks call this, after each save.

        Args:
            model: the one that was saved.
            directory: of the checkpoint.

        Raises:
            ValueError: it can't be loaded, or isn't compiled then.
        """
        load, self._load = self._load, None
        # In an inline run, several attempts share a process.
        if load is None or self._context is not polytrain.get_context():
            return
        try:
            loaded = load(directory)
        except Exception as error:
            raise ValueError(
                f"checkpointed_model() can't load what has been saved, so no restart could resume: "
                f"{error}\nDecorate your classes and functions with "
                "@keras.saving.register_keras_serializable(), or name them in "
                "checkpointed_model(custom_objects={'name': …})."
            ) from error
        # `compiled` isn't to be relied on: Keras sets it in a model that it couldn't compile.
        if getattr(model, "optimizer", None) and not getattr(loaded, "optimizer", None):
            raise ValueError(
                f"{type(model).__name__}: checkpointed_model() can't compile what has been saved, "
                "so no restart could resume. Give the class get_compile_config and "
                "compile_from_config, as Keras needs them if it overrides compile."
            )
