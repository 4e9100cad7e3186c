"""DeepSpeed in a training function: its engine, with ZeRO's shards in the run's checkpoints.

Three calls replace DeepSpeed's own:

    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    done = restore(engine)
    for epoch in range(done.get("epoch", 0), 10):
        ...
        report(engine, {"loss": loss}, epoch=epoch + 1)
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from polytrain import Checkpoint, ValidationTaskConfig, get_checkpoint, get_context
from polytrain_torch.checkpoints.parts import (
    directory_of_all,
    part_of,
    refuse_options,
    report_part,
)
from polytrain_torch.checkpoints.rank_parts import (
    States,
    differences,
    own_states,
    refuse_other_ranks,
    write_own,
)
from polytrain_torch.checkpoints.rank_states import save_rank_states
from polytrain_torch.checkpoints.read_back import has_loaded, is_first_save, try_all
from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely
from polytrain_torch.engine import DEEPSPEED
from polytrain_torch.libraries import needed
from polytrain_torch.private import deepspeed_config
from polytrain_torch.randomness import restore_random_states
from polytrain_torch.row_weights import weigh_backward
from polytrain_torch.survivors.unused_gradients import LACKS_GRADIENTS
from polytrain_torch.virtual_workers import refuse_virtual_workers

with needed("deepspeed"):
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

logger = logging.getLogger(__name__)

_PROGRESS_FILE = "progress.pt"

_last_backward: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Engine → the number of its steps when its last backward pass began."""


def initialize(**arguments: Any) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize` for the run's workers.

    On CPUs DeepSpeed would compile an operation that only inference uses; polytrain turns that off,
    so that no compiler is needed. Making one of DeepSpeed's own optimizers, such as CPUAdam, still
    needs one.

    Returns:
        Engine, optimizer, data loader and scheduler.
    """
    refuse_virtual_workers("DeepSpeed")
    # DeepSpeed calls two deprecated functions, and torch would warn of them in every step.
    warnings.filterwarnings("ignore", r".*torch\.distributed\..* is deprecated", FutureWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    made: tuple[Any, Any, Any, Any] = deepspeed.initialize(**arguments)
    engine = made[0]
    weigh_backward(engine)
    engine.backward = partial(_noting_backward, engine, engine.backward)
    return made


def restore(engine: Any, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load the attempt's checkpoint, on any number of workers. All ranks call this.

    Args:
        engine: from `initialize`.
        checkpoint: load this one instead. DeepSpeed's files are pickles, and loading a pickle can
            run code: load only checkpoints that you trust.

    Returns:
        The `progress` that was passed to `report`; empty without a checkpoint.

    Raises:
        ValueError: the checkpoint has per-rank progress or buffers of another number of workers.
    """
    checkpoint = checkpoint or get_checkpoint()
    if checkpoint is None:
        return {}
    directory = Path(checkpoint.path)
    saved = loaded(directory / _PROGRESS_FILE)
    found = saved["found"]
    refuse_other_ranks([name for names in found["names"].values() for name in names], found)
    if saved["workers"] == dist.get_world_size() or not engine.zero_optimization():
        engine.load_checkpoint(directory, tag=DEEPSPEED)
    else:
        with directory_of_all() as scratch, _loading_universal(engine):
            if get_context().get_local_rank() == 0:
                _make_universal(directory / DEEPSPEED, scratch / DEEPSPEED)
            dist.barrier()
            engine.load_checkpoint(scratch, tag=DEEPSPEED)
    own = own_states({"buffers": {}, "progress": saved["progress"]}, found, directory)
    engine.module.load_state_dict(own["buffers"], strict=False)
    restore_random_states(directory)
    has_loaded(engine)
    return own["progress"]


def report(
    engine: Any,
    metrics: Mapping[str, Any],
    *,
    validation: bool | ValidationTaskConfig = False,
    **progress: Any,
) -> None:
    """Report metrics with a checkpoint of the engine's state. All ranks call this.

    Args:
        engine: from `initialize`.
        metrics: as for `polytrain.report`.
        validation: as for `polytrain.report`: whether to validate the checkpoint.
        progress: plain data that `restore` returns, such as the next epoch's number.

    Raises:
        TypeError: a value isn't plain data, and couldn't be loaded safely; or another option of
            `polytrain.report` is passed.
        RuntimeError: there are shards on several nodes, and only rank 0 writes checkpoints.
        CheckpointError: the first checkpoint's state of the module, the scheduler or an optimizer
            without ZeRO can't be loaded.
    """
    refuse_options(progress)
    if _last_backward.get(engine) == engine.global_steps and dist.get_rank() == 0:
        _warn_of_gradients()
    with directory_of_all() as directory:
        engine.save_checkpoint(directory, tag=DEEPSPEED, save_latest=False)
        # DeepSpeed saves only rank 0's buffers.
        buffers = dict(engine.module.named_buffers())
        states: States = {"buffers": buffers, "progress": progress}
        found = differences(states)
        write_own(states, found, directory)
        if dist.get_rank() == 0:
            if is_first_save(engine):
                _read_back(engine, directory / DEEPSPEED)
            saved = {"workers": dist.get_world_size(), "progress": progress, "found": found}
            save_safely(saved, directory / _PROGRESS_FILE)
        with part_of(directory) as part:
            save_rank_states(part)
            report_part(metrics, part, validation)


@cache
def _warn_of_gradients() -> None:
    logger.warning("%s DeepSpeed counts such a step in engine.global_steps.", LACKS_GRADIENTS)


def _noting_backward(engine: Any, own_backward: Any, *args: Any, **options: Any) -> Any:
    _last_backward[engine] = engine.global_steps
    return own_backward(*args, **options)


def _read_back(engine: Any, directory: Path) -> None:
    """Load rank 0's states into copies, as the engine would. ZeRO's shards aren't tried."""
    file = min(directory.glob("*mp_rank_00_model_states.pt"))
    saved = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    states = {"lr_scheduler": saved["lr_scheduler"], "module": saved["module"]}
    if not engine.zero_optimization():
        states["optimizer"] = saved["optimizer"]
    try_all(
        [
            (getattr(engine, name), partial(_load, engine, name, state))
            for name, state in states.items()
            if state
        ]
    )


def _load(engine: Any, name: str, state: Any, copied: Any) -> None:
    if name == "module" and engine.zero_optimization_partition_weights():
        # The file has only the names of sharded weights.
        state = {**state, **dict(copied.named_parameters(remove_duplicate=False))}
    copied.load_state_dict(state)


def load_model(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the unsharded weights of a DeepSpeed checkpoint, on the CPU, without other ranks.

    DeepSpeed's files are pickles, and loading a pickle can run code: load only checkpoints that you
    trust. `Result.load_model` refuses them for that reason.
    """
    weights: dict[str, torch.Tensor]
    with checkpoint.as_directory() as directory:
        files = Path(directory, DEEPSPEED)
        if any(files.glob("*_optim_states.pt")):
            weights = get_fp32_state_dict_from_zero_checkpoint(directory, DEEPSPEED)
        else:
            [file] = files.glob("*_model_states.pt")
            # The file pickles objects of DeepSpeed's classes.
            weights = torch.load(file, map_location="cpu", weights_only=False)["module"]
    return weights


@contextmanager
def _loading_universal(engine: Any) -> Iterator[None]:
    """Have an engine load a universal checkpoint, for any number of workers."""
    config = deepspeed_config(engine)
    own, config.load_universal_checkpoint = config.load_universal_checkpoint, True
    try:
        yield
    finally:
        config.load_universal_checkpoint = own


def _make_universal(source: Path, target: Path) -> None:
    """Convert shards to a universal checkpoint, which any number of workers can load."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
                *("--input_folder", source, "--output_folder", target),
                *("--num_extract_workers", "1", "--num_merge_workers", "1"),
                "--inject_missing_state",
            ],
            cwd=directory,
            capture_output=True,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(
            "DeepSpeed can't convert its checkpoint for a different number of workers. Resume with "
            f"the same ScalingConfig(num_workers=…).\n{done.stderr[-2000:]}"
        )
