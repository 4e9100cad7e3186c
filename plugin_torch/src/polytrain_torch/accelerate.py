"""Accelerate in a training function: `Accelerator()` finds its workers by itself.

These two calls save and load Accelerate's state in the run's checkpoints:

    done = restore(accelerator)
    for epoch in range(done.get("epoch", 0), 10):
        ...
        report(accelerator, {"loss": loss}, epoch=epoch + 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polytrain import Checkpoint, ValidationTaskConfig, get_checkpoint
from polytrain.extension import survivor
from polytrain_torch.checkpoints.parts import (
    directory_of_all,
    part_of,
    refuse_options,
    report_part,
)
from polytrain_torch.checkpoints.rank_parts import (
    Differences,
    States,
    comparable,
    differences,
    keep_metric,
    own_states,
    refuse_other_ranks,
    write_own,
)
from polytrain_torch.checkpoints.read_back import (
    Load,
    has_loaded,
    is_first_save,
    try_all,
    try_shards,
)
from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely
from polytrain_torch.libraries import needed
from polytrain_torch.loaders.accelerated import keep_places
from polytrain_torch.models.parallel import models_in_ddp, unwrapped
from polytrain_torch.models.unaveraged import keep_frozen, wraps_in_ddp
from polytrain_torch.private import Accelerated
from polytrain_torch.randomness import restore_random_states
from polytrain_torch.row_weights import weigh_backward
from polytrain_torch.survivors import keeper
from polytrain_torch.survivors.keeper import Keeper
from polytrain_torch.survivors.kept_by_rank import State
from polytrain_torch.virtual_workers import refuse_virtual_workers

with needed("accelerate"):
    from accelerate import Accelerator, DistributedType
    from accelerate.checkpointing import load_custom_state
    from accelerate.utils import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME, SCHEDULER_NAME, load
    from safetensors.torch import load_file, save_file

_PROGRESS_FILE = "progress.pt"

_STEP = "step"
"""Name of the part that says where the accelerator is between two optimizer steps."""

_UNFREEZE_BEFORE = (
    "Freeze them after accelerator.prepare, with "
    "DistributedDataParallelKwargs(find_unused_parameters=True)."
)


def restore(accelerator: Accelerator, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load the attempt's checkpoint into all prepared objects. All ranks call this.

    Afterwards `accelerator.backward` weights each rank's gradients by its number of rows, if the
    batches come from a shard or from `prepare_data_loader`.

    Args:
        accelerator: the accelerator, after `prepare`.
        checkpoint: load this one instead.

    Returns:
        The `progress` that was passed to `report`; empty without a checkpoint, and with one of a
        step before the first report, which another rank has kept.

    Raises:
        ValueError: `automatic_checkpoint_naming` is set, or the checkpoint has per-rank state of
            another number of workers.
    """
    refuse_virtual_workers("Accelerate")
    _refuse_own_names(accelerator)
    weigh_backward(accelerator)
    if wraps_in_ddp(accelerator):
        for model in Accelerated(accelerator).models:
            keep_frozen(unwrapped(model), wrapped_by="prepare", remedy=_UNFREEZE_BEFORE)
    loaders = Accelerated(accelerator).loaders
    checkpoint = checkpoint or get_checkpoint()
    if checkpoint is None:
        keep_places(loaders, keeps_own=False)
        _keep(accelerator, {})
        return {}
    directory = Path(checkpoint.path)
    saved = loaded(directory / _PROGRESS_FILE)
    # What a survivor's progress says of its place was true at the report before.
    keep_places(loaders, keeps_own="step" in saved)
    found = saved["found"]
    names = [name for kind in ("parts", "progress") for name in found["names"].get(kind, ())]
    refuse_other_ranks(names, found)
    objects = _objects(accelerator)
    accelerator.load_state(checkpoint.path)
    has_loaded(accelerator)
    own = own_states({"parts": {}, "progress": saved["progress"]}, found, directory)
    for name, state in own["parts"].items():
        unwrapped(objects[name]).load_state_dict(state)
    if "step" in saved:
        # A survivor's state, whose random numbers are apart.
        accelerator.step = saved["step"]
        restore_random_states(directory)
    _keep(accelerator, own["progress"])
    return own["progress"]


def report(
    accelerator: Accelerator,
    metrics: Mapping[str, Any],
    *,
    validation: bool | ValidationTaskConfig = False,
    **progress: Any,
) -> None:
    """Report metrics with a checkpoint of all prepared objects. All ranks call this.

    State that differs by rank is restored to its rank, on the same number of workers.

    Args:
        accelerator: its prepared objects and every rank's random states are saved.
        metrics: as for `polytrain.report`.
        validation: as for `polytrain.report`: whether to validate the checkpoint.
        progress: plain data that `restore` returns, such as the next epoch's number.

    Raises:
        ValueError: `automatic_checkpoint_naming` is set.
        TypeError: a value isn't plain data, and couldn't be loaded safely; or another option of
            `polytrain.report` is passed.
        CheckpointError: an object's state in the first checkpoint can't be loaded.
    """
    refuse_virtual_workers("Accelerate")
    refuse_options(progress)
    _refuse_own_names(accelerator)
    keeps = keeper.keeper()
    if keeps is not None:
        keeps.at_report(metrics, progress, validation)
    with directory_of_all() as directory:
        objects = _objects(accelerator)
        accelerator.save_state(str(directory))
        if is_first_save(accelerator) and accelerator.is_main_process:
            _read_back(accelerator, directory)
        states: States = {
            "parts": {name: unwrapped(each).state_dict() for name, each in objects.items()},
            "progress": progress,
        }
        compared = {
            name: comparable(objects[name], state) for name, state in states["parts"].items()
        }
        found = differences({**states, "parts": compared})
        write_own(states, found, directory)
        if accelerator.is_main_process:
            saved = {"progress": progress, "found": found}
            save_safely(saved, directory / _PROGRESS_FILE)
        with part_of(directory) as part:
            report_part(metrics, part, validation)


def _objects(accelerator: Accelerator) -> dict[str, Any]:
    """Return the objects whose state only rank 0 would save, by name."""
    kind, handler = accelerator.distributed_type, accelerator.ddp_handler
    prepared = Accelerated(accelerator)
    if wraps_in_ddp(accelerator) and (handler is None or handler.broadcast_buffers):
        # Accelerate keeps the models that DDP wraps.
        models_in_ddp.update(prepared.models)
    numbered = {"registered object": prepared.registered}
    if kind in _SAVED_WHOLE:
        numbered |= {"model": prepared.models, "optimizer": prepared.optimizers}
    # DeepSpeed saves its own schedulers.
    if kind != DistributedType.DEEPSPEED:
        numbered["scheduler"] = prepared.schedulers
    for each in prepared.registered:
        keep_metric(each)
    return {
        f"{what} {number} ({type(unwrapped(each)).__name__})": each
        for what, objects in numbered.items()
        for number, each in enumerate(objects)
    }


class _Step:
    """Where the accelerator is between two optimizer steps, as a part of the state."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}


def _keep(accelerator: Accelerator, progress: Mapping[str, Any]) -> None:
    """Keep the state after each step, if the batches come from a shard or a prepared loader."""
    if accelerator.distributed_type != DistributedType.NO and not wraps_in_ddp(accelerator):
        survivor().keep_nothing("its models aren't trained with DDP")
        return
    if accelerator.scaler is not None:
        survivor().keep_nothing("it scales its gradients")
        return
    prepared = Accelerated(accelerator)
    parts = {
        # Accelerate's are around torch's, whose hooks tell of steps.
        name: each.optimizer if any(each is own for own in prepared.optimizers) else each
        for name, each in _objects(accelerator).items()
    }
    around = [accelerator, *prepared.optimizers, *prepared.schedulers]
    keeper.start(
        Keeper(
            {**parts, _STEP: _Step(accelerator)},
            progress,
            files=partial(_write_files, accelerator),
            whose="the accelerator",
            around=around,
        )
    )
    own = accelerator.backward
    # `weigh_backward` has made it a partial already, and so does not wrap this one again.
    if own.func is not _backward:
        accelerator.backward = partial(_backward, own)


def _backward(own_backward: Any, loss: Any, *args: Any, **options: Any) -> Any:
    keeps = keeper.keeper()
    if keeps is not None:
        keeps.after_forward()
    return own_backward(loss, *args, **options)


def _write_files(
    accelerator: Accelerator, directory: Path, whole: State, found: Differences, of_library: Any
) -> None:
    """Write what `restore` reads; see `survivors.point_writer.Files`."""
    names = {"model": MODEL_NAME, "optimizer": OPTIMIZER_NAME, "scheduler": SCHEDULER_NAME}
    for name in _objects(accelerator):
        what, number = name.partition(" (")[0].rsplit(" ", 1)
        file = f"custom_checkpoint_{number}.pkl"
        state = whole["parts"][name]
        if what == "model" and all(isinstance(each, torch.Tensor) for each in state.values()):
            # As `save_state` does: the run may end with this checkpoint.
            save_file(_untied(state), _safe_model_file(directory, int(number)), {"format": "pt"})
            continue
        if what in names:
            file = f"{_numbered(names[what], int(number))}.bin"
        save_safely(state, directory / file)
    saved = {"progress": whole["progress"], "found": found, **whole["parts"][_STEP]}
    save_safely(saved, directory / _PROGRESS_FILE)
    if is_first_save(accelerator):
        _read_back(accelerator, directory)


def _read_back(accelerator: Accelerator, directory: Path) -> None:
    """Load the saved states into copies of the objects, as a restart would.

    States of FSDP1 and DeepSpeed aren't tried: only all ranks together can load them.
    """
    kind, prepared = accelerator.distributed_type, Accelerated(accelerator)
    if accelerator.is_fsdp2:
        for model in prepared.models:
            try_shards(model, [each.optimizer for each in prepared.optimizers])
    models = [unwrapped(model) for model in prepared.models] if kind in _SAVED_WHOLE else []
    optimizers = [each.optimizer for each in prepared.optimizers] if models else []
    # DeepSpeed saves its own schedulers.
    has_schedulers = kind != DistributedType.DEEPSPEED
    schedulers = [each.scheduler for each in prepared.schedulers] if has_schedulers else []
    others = prepared.registered
    try_all(
        [
            *(
                (model, partial(_load_model, directory, number))
                for number, model in enumerate(models)
            ),
            *_loads_of(optimizers, directory, OPTIMIZER_NAME),
            *_loads_of(schedulers, directory, SCHEDULER_NAME),
            *(
                (each, partial(_load_other, directory, number))
                for number, each in enumerate(others)
            ),
        ]
    )


def _loads_of(parts: Sequence[Any], directory: Path, name: str) -> list[tuple[Any, Load]]:
    return [
        (part, partial(_load_file, directory / f"{_numbered(name, number)}.bin"))
        for number, part in enumerate(parts)
    ]


def _load_file(file: Path, copied: Any) -> None:
    copied.load_state_dict(load(file, map_location="cpu"))


def _load_other(directory: Path, number: int, copied: Any) -> None:
    load_custom_state(copied, str(directory), number)


def _load_model(directory: Path, number: int, copied: torch.nn.Module) -> None:
    file = _safe_model_file(directory, number)
    if not file.exists():
        _load_file(directory / f"{_numbered(MODEL_NAME, number)}.bin", copied)
        return
    # The file has tied weights only once.
    unknown = copied.load_state_dict(load_file(file), strict=False).unexpected_keys
    if unknown:
        raise KeyError(f"unexpected keys: {unknown}")


def _safe_model_file(directory: Path, number: int) -> Path:
    return directory / f"{_numbered(SAFE_MODEL_NAME, number)}.safetensors"


def _untied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's state with tied weights once, and no two tensors in the same memory."""
    untied = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if place not in seen:
            seen.add(place)
            is_all = tensor.untyped_storage().nbytes() == tensor.nbytes
            untied[name] = (tensor if is_all else tensor.clone()).contiguous()
    return untied


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


_SAVED_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Types with unsharded states, which rank 0 saves. The others save shards."""


def _refuse_own_names(accelerator: Accelerator) -> None:
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "automatic_checkpoint_naming: Accelerate would save outside of the run's checkpoint. "
            "Leave it out; RunConfig(checkpoint_config=…) says which checkpoints are kept."
        )
