"""The files of `ModelCheckpoint` for a trainer that resumes where they are gone.

`best_model_path`, `best_k_models` and `last_model_path` are paths below its directory. On another
machine, or after a clean-up, only the run's checkpoints have these files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from polytrain import (
    CheckpointConsistencyMode,
    ReportedCheckpoint,
    get_all_reported_checkpoints,
    get_context,
)
from polytrain_torch.checkpoints.parts import copy_whole
from polytrain_torch.lightning.savers import model_checkpoints

logger = logging.getLogger(__name__)

_FILE = "saved_at.json"
"""File that maps each path of a `ModelCheckpoint` to the step at which it was saved."""


class SavedFiles:
    """The steps at which files were saved, by which they are found in the run's checkpoints."""

    def __init__(self, *, file: str, fit_file: str) -> None:
        """
        Args:
            file: name of Lightning's checkpoint in the run's checkpoints.
            fit_file: name of the file that says which call of `fit` has saved one.
        """
        self._names = file, fit_file
        self._steps: dict[str, int] = {}

    def add(self, path: Path, step: int) -> None:
        """Note a file that is saved at a step."""
        self._steps[str(path)] = step

    @property
    def steps(self) -> Mapping[str, int]:
        """The step of each file's save, by its path."""
        return self._steps

    def forget_unused(self, trainer: Any) -> None:
        """Forget the files that no callback names any more."""
        used = {path for each in model_checkpoints(trainer) for path in _paths(each.state_dict())}
        self._steps = {path: step for path, step in self._steps.items() if path in used}

    def write(self, directory: Path, steps: Mapping[str, int]) -> None:
        """Write the steps of files, as `steps` has returned them."""
        (directory / _FILE).write_text(json.dumps(steps))

    def restore(self, trainer: Any, checkpoint: Mapping[str, Any], resumed: Path) -> None:
        """Have each callback's state name files that exist, copied from the run's checkpoints.

        All ranks call this before the callbacks load their states.

        Args:
            trainer: Lightning's trainer.
            checkpoint: Lightning's, in which the callbacks' states are changed.
            resumed: directory of the run's checkpoint that has it.
        """
        reported = get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
        if not reported:
            # It is another run's, whose best models aren't this run's.
            return
        file = resumed / _FILE
        self._steps = json.loads(file.read_text()) if file.exists() else {}
        kept = _Kept(reported, names=self._names, resumed=resumed, step=checkpoint["global_step"])
        for each in model_checkpoints(trainer):
            state = checkpoint["callbacks"].get(each.state_key)
            # A directory such as s3://bucket/models outlives the workers.
            if state and "://" not in f"{each.dirpath}{state['dirpath']}":
                self._restore_one(each, state, kept)

    def _restore_one(self, callback: ModelCheckpoint, state: dict[str, Any], kept: _Kept) -> None:
        directory = Path(str(callback.dirpath))

        def placed(path: str) -> str | None:
            """Return where a saved file is, copied there if need be; None if it is lost."""
            if Path(path).exists():
                return path
            return kept.copied(self._steps.get(path), directory / Path(path).name)

        moved: list[Any] = [None]
        if dist.get_rank() == 0:
            moved = [{path: placed(path) for path in _paths(state)}]
        dist.broadcast_object_list(moved)
        by_path: dict[str, str | None] = moved[0]
        for path, place in by_path.items():
            is_first_of_node = dist.get_rank() != 0 and get_context().get_local_rank() == 0
            # The nodes may share the directory.
            if is_first_of_node and place is not None and not Path(place).exists():
                placed(path)
        for path, place in by_path.items():
            if place is not None and path in self._steps:
                self._steps[place] = self._steps.pop(path)
        _replace(callback, state, by_path)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The checkpoints that the run has kept."""

    reported: Sequence[ReportedCheckpoint]
    names: tuple[str, str]
    resumed: Path
    """The directory of the one that is resumed, which is on this node."""

    step: int
    """Its step."""

    def copied(self, step: int | None, target: Path) -> str | None:
        """Copy what was saved at a step of this `fit`; return the copy, or None if it is gone."""
        file, fit_file = self.names
        if step == self.step:
            return str(copy_whole(self.resumed / file, target))
        fit = (self.resumed / fit_file).read_text()
        for each in self.reported:
            # Only those that may be it are fetched.
            if step is None or each.metrics.get("step") != step:
                continue
            with each.checkpoint.as_directory() as found:
                if Path(found, fit_file).read_text() == fit:
                    return str(copy_whole(Path(found, file), target))
        return None


def _paths(state: Mapping[str, Any]) -> list[str]:
    """Return the paths of the best models in a callback's state, and of the last one."""
    paths = (*state["best_k_models"], state["best_model_path"], state["last_model_path"])
    return [*dict.fromkeys(filter(None, paths))]


def _replace(
    callback: ModelCheckpoint, state: dict[str, Any], moved: Mapping[str, str | None]
) -> None:
    """Put the files' places into a callback's state, and leave out those that are lost."""
    scores = {
        place: score
        for path, score in state["best_k_models"].items()
        if (place := moved[path]) is not None
    }
    best, worst = (min, max) if callback.mode == "min" else (max, min)
    if state["best_model_path"]:
        place = moved[state["best_model_path"]]
        if place is None:
            _warn_of_lost(callback, state["best_model_path"])
            place = best(scores, key=lambda path: scores[path]) if scores else ""
            state["best_model_score"] = scores.get(place)
        state["best_model_path"] = place
    state["last_model_path"] = moved.get(state["last_model_path"]) or ""
    # Otherwise Lightning takes over the path of the best model alone, without its score.
    state["dirpath"] = callback.dirpath
    state["best_k_models"] = scores
    if scores:
        state["kth_best_model_path"] = worst(scores, key=lambda path: scores[path])
        state["kth_value"] = scores[state["kth_best_model_path"]]


def _warn_of_lost(callback: ModelCheckpoint, path: str) -> None:
    if dist.get_rank() == 0:
        logger.warning(
            "The best model so far is lost: %s is gone, and none of the run's checkpoints has it. "
            "best_model_path is the best of those that are left, and of the following. Use a "
            "dirpath that outlives the workers, or CheckpointConfig(num_to_keep=…, "
            "checkpoint_score_attribute=%r).",
            path,
            callback.monitor,
        )
