"""Loads a run's first checkpoint as a restart would: a run that can't resume fails early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polytrain

Load = Callable[[Path], Any]
"""Loads the model from a checkpoint's directory."""


class FirstSave:
    """Checks the first checkpoint that a new run saves."""

    def __init__(self) -> None:
        self._load: Load | None = None
        self._context: Any = None

    def will(self, load: Load, *, is_new: bool) -> None:
        """Remember how a restart of this run will load its checkpoint, if there is none so far."""
        self._load, self._context = load if is_new else None, polytrain.get_context()

    @property
    def is_known(self) -> bool:
        """Whether it is known, in this attempt, how a restart loads its checkpoint."""
        return self._context is not None and self._context is polytrain.get_context()

    def check(self, model: Any, directory: Path) -> None:
        """Load the first checkpoint once. All ranks call this, after each save of a model.

        Raises:
            ValueError: the model can't be loaded, or isn't compiled after loading.
        """
        load, self._load = self._load, None
        # In inline runs, several attempts share a process.
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
        # `compiled` is unreliable: Keras also sets it in a model that it couldn't compile.
        if getattr(model, "optimizer", None) and not getattr(loaded, "optimizer", None):
            raise ValueError(
                f"{type(model).__name__}: checkpointed_model() can't compile what has been saved, "
                "so no restart could resume. Give the class get_compile_config and "
                "compile_from_config, as Keras needs them if it overrides compile."
            )
