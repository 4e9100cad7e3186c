"""Reports, checkpoints and resumption for training functions that call `model.fit`.

    with polytrain_tf.strategy().scope():
        model = checkpointed_model() or build_model()
    model.fit(data, initial_epoch=checkpointed_epoch(), epochs=10, callbacks=[ReportCallback()])

This uses only Keras, so it works with all of its backends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import keras

import polytrain
from polytrain.collective import broadcast_from_rank_zero
from polytrain.extension import Calls
from polytrain_tf.callback_state import load_callbacks, save_callbacks
from polytrain_tf.epochs import EpochCallback, arrange_callbacks
from polytrain_tf.saved import Progress, has_progress, load_to_resume, progress_of, reported, save

_fits = Calls("fit()")


class _Restart:
    """Loads a run's first checkpoint as a restart would: a run that can't resume fails early."""

    def __init__(self) -> None:
        self._load: Callable[[Path], Any] | None = None
        self._context: Any = None

    def will(self, load: Callable[[Path], Any], *, is_new: bool) -> None:
        """Remember how a restart of this run will load its checkpoint, if there is none so far.

        Args:
            load: loads the model from a checkpoint's directory.
        """
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


_restart = _Restart()


class ReportCallback(EpochCallback):
    """Reports the metrics of every epoch, and a checkpoint every few epochs and at the end.

    A checkpoint has Keras's own file `model.keras`, with layers, weights and optimizer. Beside it
    are the layers' random states, which Keras resets when it loads a model, and the state of the
    other callbacks. A fit that begins at `checkpointed_epoch()` resumes from them.

    If a training function has several fits with this callback, the fit that saved the newest
    checkpoint resumes. An earlier fit raises a ValueError: its result isn't in the checkpoint.

    If the training function has called `checkpointed_model()`, a run's first checkpoint is loaded
    once, as a check. A ValueError tells why a restart couldn't load it.
    """

    def __init__(self, *, checkpoint_frequency: int = 1) -> None:
        """
        Args:
            checkpoint_frequency: epochs between two checkpoints; 0 saves only at the end, and when
                the run asks for a checkpoint (`polytrain.checkpoint_requested`).
        """
        super().__init__()
        self._frequency = checkpoint_frequency
        self._has_begun = False
        self._fit = 1

    def resumed_progress(self, epochs: int) -> Progress | None:
        checkpoint = _resumed(_fits.upcoming(), epochs)
        return None if checkpoint is None else progress_of(checkpoint)

    def on_train_begin(self, logs: Any = None) -> None:
        self._has_begun = False
        self._fit = _fits.next()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Not in `on_train_begin`: only the first epoch shows whether this fit resumes.
        if not self._has_begun:
            self._has_begun = True
            self.resumed = _resumed(self._fit, epoch)
            if self.resumed is not None:
                load_callbacks(self.others, self.resumed)
                if self.load_more is not None:
                    self.load_more(self.resumed)
        super().on_epoch_begin(epoch, logs)

    def progress(self, epochs: int) -> Progress:
        return Progress(epochs=epochs, is_over=self.model.stop_training, fit=self._fit)

    def reported_metrics(self, epochs: int, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"epoch": epochs, **metrics}

    def why_not_within_epochs(self) -> str | None:
        if _fits.upcoming() > 1:
            return "a restart begins with the function's first fit(), and this is a later one"
        if not _restart.is_known:
            return "the training function doesn't load what it starts with by checkpointed_model()"
        return None

    def report_epoch(self, epochs: int, metrics: Mapping[str, Any], *, is_last: bool) -> None:
        is_due = self._frequency > 0 and epochs % self._frequency == 0
        # Ranks save together, and may be asked at different times.
        if not (is_due or is_last or broadcast_from_rank_zero(polytrain.checkpoint_requested())):
            polytrain.report(metrics)
            return
        with reported(metrics) as directory:
            save(self.model, directory, self.progress(epochs))
            save_callbacks(self.others, directory)
            _restart.check(self.model, directory)
            if self.save_more is not None:
                # Last: a model that is loaded for the check draws random numbers.
                self.save_more(directory)


def checkpointed_model(*, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the compiled model of the checkpoint to resume from; None in a new run.

    With a strategy, call this in the strategy's scope.

    Args:
        custom_objects: name → your class or function, as for `keras.models.load_model`; not needed
            for those decorated with `keras.saving.register_keras_serializable`.

    Raises:
        NotInWorkerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    loads = partial(load_to_resume, custom_objects=custom_objects)
    _restart.will(loads, is_new=checkpoint is None)
    if checkpoint is None:
        return None
    return loads(Path(checkpoint.path))


def checkpointed_epoch() -> int:
    """Return the number of finished epochs in the checkpoint to resume from; 0 in a new run.

    Raises:
        NotInWorkerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    return 0 if checkpoint is None else progress_of(Path(checkpoint.path)).epochs


def _resumed(fit: int, epochs: int) -> Path | None:
    """Return the checkpoint that a fit resumes from after so many epochs; None if it starts fresh.

    Raises:
        ValueError: a later fit of the training function saved the checkpoint.
    """
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is None or not has_progress(Path(checkpoint.path)):
        return None
    path = Path(checkpoint.path)
    progress = progress_of(path)
    resumes = _fits.resumes(fit, made_by=progress.fit)
    return path if resumes and progress.epochs == epochs else None


def _arranging(own_fit: Any) -> Any:
    """Return a `fit` that lets `ReportCallback` arrange its arguments."""
    signature = inspect.signature(own_fit)

    @functools.wraps(own_fit)
    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arrange_callbacks(bound.arguments)
        return own_fit(*bound.args, **bound.kwargs)

    return fit


if keras.backend.backend() != "tensorflow":
    # On TensorFlow the backend does this. Now, since `model.fit(…, callbacks=[ReportCallback()])`
    # looks up `fit` first.
    keras.Model.fit = _arranging(keras.Model.fit)
