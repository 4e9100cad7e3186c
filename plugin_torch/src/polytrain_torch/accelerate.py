"""Accelerate in a training function: `Accelerator()` finds its workers by itself.

With these two calls its `save_state` and `load_state` use the run's checkpoints:

    done = restore(accelerator)
    for epoch in range(done.get("epoch", 0), 10):
        ...
        report(accelerator, {"loss": loss}, epoch=epoch + 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import polytrain
from polytrain import Checkpoint, get_checkpoint
from polytrain_torch.checkpoint_parts import checkpoint_of, directory_of_all, part_of
from polytrain_torch.engine import unwrapped
from polytrain_torch.frozen import keep_frozen, wraps_in_ddp
from polytrain_torch.libraries import needed
from polytrain_torch.read_back import copy_without_values, try_loading
from polytrain_torch.safe_serialization import loaded, save_safely

with needed("accelerate"):
    from accelerate import Accelerator, DistributedType
    from accelerate.utils.other import load

_PROGRESS_FILE = "progress.pt"

_UNFREEZE_BEFORE = (
    "Freeze them after accelerator.prepare, with "
    "DistributedDataParallelKwargs(find_unused_parameters=True)."
)


def restore(accelerator: Accelerator, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load the attempt's checkpoint into all prepared objects. All ranks call this.

    Args:
        accelerator: after `prepare`.
        checkpoint: load this one instead.

    Returns:
        The `progress` that `report` got. Empty if training starts.

    Raises:
        ValueError: `automatic_checkpoint_naming` is set.
    """
    _refuse_own_names(accelerator)
    if wraps_in_ddp(accelerator):
        for model in accelerator._models:
            keep_frozen(unwrapped(model), wrapped_by="prepare", remedy=_UNFREEZE_BEFORE)
    checkpoint = checkpoint or get_checkpoint()
    if checkpoint is None:
        return {}
    accelerator.load_state(checkpoint.path)
    _read_back.add(accelerator)
    progress: dict[str, Any] = loaded(Path(checkpoint.path, _PROGRESS_FILE))
    return progress


def report(accelerator: Accelerator, metrics: Mapping[str, Any], **progress: Any) -> None:
    """Report metrics with a checkpoint of all prepared objects. All ranks call this.

    Args:
        accelerator: whose state is saved, the random numbers of every rank included.
        metrics: as for `polytrain.report`.
        progress: plain data, which `restore` returns, such as the next epoch's number.

    Raises:
        ValueError: `automatic_checkpoint_naming` is set.
        TypeError: if a value isn't plain data, and couldn't be loaded safely.
        CheckpointError: the state of an optimizer, a scheduler or a registered object, which the
            first save of a run tries to load, can't be loaded.
    """
    _refuse_own_names(accelerator)
    with directory_of_all() as directory:
        accelerator.save_state(str(directory))
        if accelerator.is_main_process:
            save_safely(progress, directory / _PROGRESS_FILE)
            if accelerator not in _read_back:
                _try_loading(accelerator, directory)
        _read_back.add(accelerator)
        with part_of(directory) as part:
            polytrain.report(metrics, checkpoint_of(part))


_read_back: WeakSet[Accelerator] = WeakSet()
"""Those with a checkpoint that was loaded, or tried."""


def _try_loading(accelerator: Accelerator, directory: Path) -> None:
    """Load a checkpoint into copies of what was saved, as a restart would.

    What FSDP and DeepSpeed shard is saved in another way, and isn't tried.
    """
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return
    optimizers = [each.optimizer for each in accelerator._optimizers]
    schedulers = [each.scheduler for each in accelerator._schedulers]
    own = accelerator._custom_objects
    for name, part, options in (
        *((_numbered("optimizer", at), part, {}) for at, part in enumerate(optimizers)),
        *((_numbered("scheduler", at), part, {}) for at, part in enumerate(schedulers)),
        # Accelerate loads these with whatever they hold.
        *((f"custom_checkpoint_{at}.pkl", part, _ANYTHING) for at, part in enumerate(own)),
    ):
        others = [each for each in optimizers if each is not part]
        copied = copy_without_values(part, keeping=others)
        if copied is not None and (directory / name).exists():
            load_it = partial(_load_into, copied, directory / name, **options)
            try_loading(type(part).__qualname__, load_it)


def _load_into(part: Any, file: Path, **options: Any) -> None:
    part.load_state_dict(load(file, map_location="cpu", **options))


_ANYTHING = {"weights_only": False}


def _numbered(kind: str, number: int) -> str:
    return f"{kind}{f'_{number}' if number else ''}.bin"


def _refuse_own_names(accelerator: Accelerator) -> None:
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "automatic_checkpoint_naming: Accelerate would save outside of the run's checkpoint. "
            "Leave it out; RunConfig(checkpoint_config=…) says which checkpoints are kept."
        )
