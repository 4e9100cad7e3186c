"""Private names of other packages: where they may stand, and which one an installed version lacks.

A new version of a framework may rename them. Here that is one line, not the failure of a run. They
stand only in the modules called `private`, one for each framework, which give the reason for each.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

ROOT = Path(__file__).parents[2]

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {
        "torch": ("_C", "_lazy_clone"),
        "torch._C": ("_current_graph_task_id", "_is_cow_tensor", "_storage_Use_Count"),
        "torch.UntypedStorage": ("_cdata",),
        "torch.Tensor": ("_version",),
        "torch._dynamo.OptimizedModule": ("_orig_mod",),
        "torch.autograd": ("_engine_run_backward",),
        "torch.autograd.Variable": ("_execution_engine",),
        "torch.nn.Module": ("_buffers", "_save_to_state_dict"),
        "torch.nn.parallel.DistributedDataParallel": ("_comm_hooks", "_sync_buffers"),
        "torch.distributed.ProcessGroup": (
            *("_allgather_base", "_get_backend", "_get_sequence_number_for_group"),
            "_reduce_scatter_base",
        ),
        "torch.distributed.ProcessGroupGloo._Options": ("_timeout",),
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
            "_checkpoint_wrapped_module",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
        "torch.distributed.checkpoint.state_dict": ("_init_optim_state",),
        "torch.distributed.distributed_c10d": ("_get_default_store", "_world"),
        "torch.distributed.fsdp.FSDPModule": ("_get_fsdp_state",),
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": ("_unsharded_param",),
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": (
            "_partial_reduce_output",
        ),
        "torch.optim.lr_scheduler.LRScheduler": ("_opt_called",),
        "torch.serialization": ("_get_layout",),
        "torch.utils.data.DataLoader": ("_iterator",),
        "torch.utils.tensorboard.SummaryWriter": ("_get_file_writer",),
    },
    "accelerate": {
        "accelerate.Accelerator": (
            "_custom_objects",
            "_dataloaders",
            "_is_accelerate_prepared",
            "_models",
            "_optimizers",
            "_schedulers",
        ),
    },
    "deepspeed": {"deepspeed.DeepSpeedEngine": ("_config",)},
    "lightning": {
        "lightning.Trainer": (
            *("_accelerator_connector", "_checkpoint_connector", "_logger_connector"),
        ),
        "lightning.LightningModule": ("_current_fx_name",),
        "lightning.pytorch.callbacks.BatchSizeFinder": ("_batch_arg_name", "_early_exit"),
        "lightning.pytorch.callbacks.LearningRateFinder": (
            *("_attr_name", "_early_exit", "_max_lr", "_min_lr", "_mode", "_num_training_steps"),
            "_update_attr",
        ),
        "lightning.pytorch.callbacks.ModelCheckpoint": (
            *("_defer_save_until_validation", "_last_checkpoint_saved", "_last_global_step_saved"),
            *("_monitor_candidates", "_save_last_checkpoint"),
        ),
        "lightning.pytorch.loggers.CSVLogger": ("_experiment", "_version"),
        "lightning.pytorch.loggers.TensorBoardLogger": (
            *("_default_hp_metric", "_experiment", "_version"),
        ),
        "lightning.pytorch.loops._EvaluationLoop": ("_results",),
        "lightning.pytorch.loops._TrainingEpochLoop": (
            *("_batches_that_stepped", "_num_ready_batches_reached", "_results"),
        ),
        "lightning.pytorch.loops.fit_loop._FitLoop": (
            *("_combined_loader", "_restarting", "_should_accumulate"),
        ),
        "lightning.pytorch.plugins.io.AsyncCheckpointIO": ("_error",),
        "lightning.pytorch.strategies.launchers": ("_MultiProcessingLauncher",),
        "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector": (
            *("_callback_metrics", "_current_fx", "_first_loop_iter", "_logged_metrics"),
            "_progress_bar_metrics",
        ),
        "lightning.pytorch.trainer.connectors.logger_connector.result._ResultMetric": (
            *("_forward_cache", "_update_count"),
        ),
        "lightning.pytorch.tuner.lr_finder": ("_LRFinder", "_determine_lr_attr_name"),
    },
    "transformers": {
        "transformers.Trainer": (
            *("_finalize_training", "_globalstep_last_logged", "_init_training_state"),
            "_initial_global_step",
            *("_load_rng_state", "_maybe_log_save_evaluate", "_total_loss_scalar", "_tr_loss"),
        ),
        "transformers.integrations.TensorBoardCallback": ("_init_summary_writer",),
    },
    "trl": {"trl.SFTTrainer": ("_metrics", "_total_train_tokens")},
    "keras": {
        "keras.Layer": ("_flatten_layers",),
        "keras.Model": ("_compile_loss", "_compile_metrics"),
        "keras.callbacks.ModelCheckpoint": ("_batches_seen_since_last_saving",),
        "keras.callbacks.SwapEMAWeights": ("_ema_weights_in_model",),
        "keras.optimizers.Optimizer": ("_trainable_variables", "_use_weight_decay"),
        "keras.src.backend.tensorflow.trainer": (
            *("_collective_all_reduce_multi_worker", "reduce_per_replica"),
        ),
        "keras.src.backend.tensorflow.trainer.TFEpochIterator": (
            *("_distributed_dataset", "_get_iterator", "_num_batches"),
        ),
        "keras.src.backend.tensorflow.trainer.TensorFlowTrainer": (
            *("_get_metrics_result_or_logs", "_maybe_symbolic_build", "_symbolic_build"),
        ),
        "keras.src.losses.loss": ("reduce_values", "scale_loss_for_distribution"),
        "keras.src.optimizers.base_optimizer.BaseOptimizer": ("_clip_gradients", "scale_loss"),
        "keras.src.random.seed_generator.SeedGenerator": ("next",),
        "keras.src.saving.serialization_lib": ("_retrieve_class_or_fn",),
        "keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter": ("get_tf_dataset",),
    },
    "tensorflow": {
        "tensorflow.data.Dataset": ("_functions", "_inputs"),
        "tensorflow.python.autograph.pyct.loader": ("tempfile",),
        "tensorflow.python.data.ops.shuffle_op": ("_ShuffleDataset",),
        "tensorflow.python.data.ops.shuffle_op._ShuffleDataset": ("_seed", "_seed2"),
        "tensorflow.python.eager.context.Context": ("configure_coordination_service",),
    },
    "tf_keras": {
        "tf_keras.src.engine.data_adapter.DataHandler": (
            *("_adapter", "_dataset", "_epochs", "_inferred_steps", "_initial_epoch"),
            *("_steps_per_epoch", "_truncate_execution_to_epoch"),
        ),
        "tf_keras.src.engine.data_adapter.DatasetAdapter": ("_dataset", "_validate_args"),
    },
    "lightgbm": {
        "lightgbm.Booster": ("_handle",),
        "lightgbm.callback": ("_EarlyStoppingCallback", "_RecordEvaluationCallback"),
        "lightgbm.callback._RecordEvaluationCallback": ("_init",),
    },
    "multiprocessing": {
        "multiprocessing.resource_tracker": ("_resource_tracker",),
        "multiprocessing.resource_tracker.ResourceTracker": ("_fd", "_pid"),
    },
    "ray": {"ray.data.DataContext": ("_execution_idx", "_set_current")},
}
"""Package to owner (a module or a class) to names that are used as attributes."""

OF_PYTHON = {
    "_asdict",
    "_current_frames",
    "_exit",
    "_fields",
    "_getframe",
    "_registry",
    "_replace",
    "_run_exitfuncs",
    "_shutdown",
}

OTHER_TEXTS = {"_bagging_fraction", "_bynode", "_mask", "_orig", "_parallel"}
"""Texts in the plugins that look like a private name: ends of parameters' names."""

ELSEWHERE = {
    # Both plugins for Keras use it, and it imports none.
    ("_flatten_layers", "core/src/polytrain/keras_layers.py"),
    # The standard library's tracker of names, which has no public interface.
    ("_fd", "core/src/polytrain/workers/processes/named_memory.py"),
    ("_pid", "core/src/polytrain/workers/processes/named_memory.py"),
    ("_resource_tracker", "core/src/polytrain/workers/processes/named_memory.py"),
    # The driver's list of modules that a zygote imports: what a version lacks is left out.
    ("torch._dynamo", "plugin_torch/src/polytrain_torch/backend.py"),
}
"""Private names outside of the modules called `private`."""

UNDOCUMENTED = {"keras.src", "tensorflow.python", "tf_keras.src"}
"""Packages without an underscore whose modules move between versions."""


@cache
def trees() -> dict[Path, ast.Module]:
    """Each module's syntax tree: read by the first test, not by each process that collects."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for path in sorted(ROOT.glob("*/src/**/*.py"))
    }


@cache
def nodes(file: Path) -> list[ast.AST]:
    """All nodes of a module's tree, which several tests go through."""
    return list(ast.walk(trees()[file]))


def is_private(path: str) -> bool:
    parts = path.split(".")
    return ".".join(parts[:2]) in UNDOCUMENTED or any(re.match(r"_[^_]", part) for part in parts)


@cache
def bound_in(file: Path) -> set[str]:
    """Names that a module defines, its classes' attributes included."""
    bound = set()
    for node in nodes(file):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                bound.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                bound.add(name)
    return bound


@cache
def ours() -> set[str]:
    return {name for file in trees() for name in bound_in(file)}


def attributes_in(file: Path) -> Iterator[str]:
    """Private names of other packages that a module uses as attributes, or names in a text."""
    of_this_module = bound_in(file)
    for node in nodes(file):
        match node:
            # A base class of `self` may be in another module of ours.
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name not in ours():
                yield name
            case ast.Attribute(value=owner, attr=name) if name not in of_this_module:
                if not (isinstance(owner, ast.Name) and owner.id == "self"):
                    yield name
            case ast.Constant(value=str(name)) if file.parts[0].startswith("plugin_"):
                # Also a class's name and a method's, with a dot between them.
                _, _, last = name.rpartition(".")
                if re.fullmatch(r"([A-Z]\w+\.)?_[a-zA-Z]\w+", name) and last not in (
                    OTHER_TEXTS | of_this_module
                ):
                    yield last


def imports_in(file: Path) -> Iterator[str]:
    """Private names of other packages that a module imports, and private modules that it names."""
    for node in nodes(file):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{each.name}" for each in names)
            case ast.Constant(value=str(text)) if text.partition(".")[0] in NAMES:
                if re.fullmatch(r"\w+(\.\w+)+", text):
                    yield text


@cache
def uses() -> set[tuple[str, Path]]:
    return {
        (name, file)
        for file in trees()
        for name in attributes_in(file)
        if is_private(name) and name not in OF_PYTHON
    }


@cache
def imports() -> set[tuple[str, Path]]:
    return {
        (name, file)
        for file in trees()
        for name in imports_in(file)
        if is_private(name) and name.partition(".")[0] in NAMES
    }


def test_private_names_stand_only_in_the_modules_for_them() -> None:
    elsewhere = {
        (name, str(file)) for name, file in uses() | imports() if file.name != "private.py"
    }
    assert elsewhere == ELSEWHERE


def test_the_table_has_every_private_name_that_is_used() -> None:
    listed = {name for owners in NAMES.values() for names in owners.values() for name in names}
    assert {f"{name} in {file}" for name, file in uses() if name not in listed} == set()


def test_the_table_has_no_name_that_is_used_no_more() -> None:
    texts = "\n".join(path.read_text() for path in map(ROOT.joinpath, trees()))
    listed = {name for owners in NAMES.values() for names in owners.values() for name in names}
    assert listed - {*re.findall(r"\w+", texts)} == set()


LOOK = r"""
import functools, inspect, json, pkgutil, re, sys

def has(owner, name):
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    # An attribute that only objects have, of this class or another one, is set by a method.
    # Of an argument, such as `f(self.a, b=1)`, the sign has no spaces around it.
    set_there = rf"\.{name}\b(,\s*[\w.]+)*\)?(:[^=\n]+)?\s=\s"
    return any(re.search(set_there, source_of(base)) for base in owner.__mro__)

@functools.cache
def source_of(cls):
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # it isn't written in Python
        return ""

lacking = []
for path, name in json.load(sys.stdin):
    try:
        owner = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        lacking.append(f"{path}.{name}")
        continue
    if not has(owner, name):
        try:
            __import__(f"{path}.{name}")
        except ImportError:
            lacking.append(f"{path}.{name}")
print(json.dumps(lacking))
"""


@pytest.fixture(scope="module")
def lacking() -> set[str]:
    """The names that installed versions lack, by one process that imports all of them."""
    listed = [
        (owner, name)
        for owners in NAMES.values()
        for owner, names in owners.items()
        for name in names
    ]
    imported = [path.rpartition(".")[::2] for path, _ in sorted(imports())]
    looked = subprocess.run(
        [sys.executable, "-c", LOOK],
        input=json.dumps([*listed, *imported]),
        capture_output=True,
        text=True,
    )
    assert looked.returncode == 0, looked.stderr
    return {*json.loads(looked.stdout.splitlines()[-1])}


# `make lowest` has no TRL, because the oldest Accelerate and TRL exclude each other.
INSTALLED = [package for package in NAMES if package != "trl" or find_spec(package)]


# All frameworks are imported, for half a minute: `make newest` and `make lowest` do too.
@pytest.mark.sweep
@pytest.mark.parametrize("package", map(only_in_sweep, INSTALLED))
def test_the_installed_version_has_the_private_names_that_are_used(
    package: str, lacking: set[str]
) -> None:
    found = sorted(path for path in lacking if path.partition(".")[0] == package)
    assert [f"{path}, used by {', '.join(users_of(path))}" for path in found] == []


def users_of(path: str) -> list[str]:
    name = path.rpartition(".")[2]
    return [str(file) for file in trees() if re.search(rf"\b{name}\b", (ROOT / file).read_text())]
