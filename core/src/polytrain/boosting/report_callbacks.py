"""Reports of boosting rounds by callbacks in training functions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import polytrain
from polytrain_plugins.close_names import did_you_mean


class RoundReporter:
    """Reports metrics after every round, and a checkpoint at an interval and at the end.

    A framework's callback calls `_report` after each round.
    """

    CHECKPOINT_NAME: ClassVar[str]
    """The model's file in a checkpoint, as `Result.load_model` reads it."""

    def __init__(self, *, checkpoint_frequency: int = 0) -> None:
        """
        Args:
            checkpoint_frequency: rounds between two checkpoints; 0 saves only the last round, and
                when the run asks for a checkpoint (`polytrain.checkpoint_requested`). Then a
                condition (`RunConfig.stop`) ends the run one round after it is met, with a
                checkpoint.
        """
        super().__init__()
        self._filename = self.CHECKPOINT_NAME
        self._frequency = checkpoint_frequency
        self._at_end = True

    def _reported(self, measured: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics to report, from all metrics of a round."""
        return measured

    def _report(
        self,
        round_: int,
        measured: Mapping[str, Any],
        *,
        is_last: bool,
        save: Callable[[Path], None],
    ) -> None:
        """Report a round. Only rank 0 saves the model: it is the same on all ranks.

        Args:
            round_: the round's number, from 1.
            measured: metrics by their full names, such as "valid-logloss".
            is_last: whether training ends with this round.
            save: writes the model into a file.
        """
        metrics = self._reported(measured)
        is_due = self._frequency > 0 and round_ % self._frequency == 0
        is_saved = is_due or (is_last and self._at_end)
        if polytrain.get_context().get_world_rank() > 0 or not (
            is_saved or polytrain.checkpoint_requested()
        ):
            polytrain.report(metrics)
            return
        with tempfile.TemporaryDirectory() as directory:
            save(Path(directory, self._filename))
            polytrain.report(metrics, checkpoint=polytrain.Checkpoint.from_directory(directory))


class RayTrainReporter(RoundReporter):
    """Takes the arguments of Ray Train's report callbacks."""

    @staticmethod
    def read_model(path: Path) -> Any:
        """Read the framework's model from a file."""
        raise NotImplementedError

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        filename: str | None = None,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        """
        Args:
            metrics: names such as "valid-logloss", or reported name → such a name; default: all.
            filename: the model's file in a checkpoint; by default the one that `Result.load_model`
                reads.
            frequency: rounds between two checkpoints; 0 for none before the end.
            checkpoint_at_end: whether to save a checkpoint after the last round.
            results_postprocessing_fn: takes a round's metrics and returns the metrics to report.
        """
        super().__init__(checkpoint_frequency=frequency)
        self._filename = filename or self.CHECKPOINT_NAME
        self._at_end = checkpoint_at_end
        self._metrics = [metrics] if isinstance(metrics, str) else metrics or ()
        self._postprocess = results_postprocessing_fn

    def _reported(self, measured: Mapping[str, Any]) -> Mapping[str, Any]:
        chosen = self._metrics
        names = chosen if isinstance(chosen, Mapping) else {name: name for name in chosen}
        for name in names.values():
            if name not in measured:
                known = ", ".join(map(repr, measured)) or "none"
                raise KeyError(
                    f"metrics: no metric is named {name!r}. {did_you_mean(name, measured)}"
                    f"There are: {known}."
                )
        reported = {new: measured[name] for new, name in names.items()} or dict(measured)
        return reported if self._postprocess is None else self._postprocess(reported)

    @classmethod
    def get_model(cls, checkpoint: polytrain.Checkpoint, filename: str | None = None) -> Any:
        """Return the model of a checkpoint.

        Args:
            checkpoint: a checkpoint that this callback has reported.
            filename: the model's file, as for the callback.
        """
        with checkpoint.as_directory() as directory:
            return cls.read_model(Path(directory, filename or cls.CHECKPOINT_NAME))


def checkpointed_model(callback: type[RayTrainReporter]) -> Any:
    """Return the model of the checkpoint that the attempt resumes from; None without one.

    Raises:
        NotInWorkerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    return None if checkpoint is None else callback.get_model(checkpoint)
