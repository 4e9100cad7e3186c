"""polytrain: one distributed trainer for every framework, on Ray.

Importing this package imports neither Ray nor a framework. Each name is loaded when it is first
used: agents and worker processes import only submodules, which makes them start faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain.lazy_names import LazyNames

if TYPE_CHECKING:
    from polytrain.api.loading import load
    from polytrain.api.result import Result
    from polytrain.api.run_handle import RunHandle, RunStatus
    from polytrain.api.trainer import Trainer, make_trainer
    from polytrain.checkpoint.checkpoint import Checkpoint
    from polytrain.config.configs import (
        CheckpointConfig,
        DataConfig,
        FailureConfig,
        RunConfig,
        ScalingConfig,
    )
    from polytrain.config.mix import Mix
    from polytrain.config.validation_config import (
        ValidationConfig,
        ValidationFn,
        ValidationTaskConfig,
    )
    from polytrain.errors import (
        BadDataError,
        CheckpointError,
        DamagedFileError,
        Failure,
        FailureKind,
        NotInWorkerError,
        PredictionFailedError,
        ReturnValueError,
        RunFormatError,
        RunNotFoundError,
        RunOwnedError,
        TrainingFailedError,
    )
    from polytrain.events.notices import PreemptionInfo, Rollback
    from polytrain.prediction.predict import PredictionOutput
    from polytrain.ray_names.callbacks import TrainRunContext, UserCallback
    from polytrain.ray_names.trainers import DataParallelTrainer
    from polytrain.record.repetition import Replay
    from polytrain.workers.session.checkpoint_files import (
        CheckpointConsistencyMode,
        CheckpointUploadMode,
        ReportedCheckpoint,
        ReportedCheckpointStatus,
    )
    from polytrain.workers.session.context import Context, TrainContext
    from polytrain.workers.session.worker_api import (
        checkpoint_requested,
        get_all_reported_checkpoints,
        get_checkpoint,
        get_context,
        get_dataset_shard,
        get_preemption_info,
        heartbeat,
        report,
    )
    from polytrain_plugins import InvalidJobError, PolytrainError, backend_names

__all__ = [
    "TRAIN_DATASET_KEY",
    "BadDataError",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointError",
    "CheckpointUploadMode",
    "Context",
    "DamagedFileError",
    "DataConfig",
    "DataParallelTrainer",
    "Failure",
    "FailureConfig",
    "FailureKind",
    "InvalidJobError",
    "Mix",
    "NotInWorkerError",
    "PolytrainError",
    "PredictionFailedError",
    "PredictionOutput",
    "PreemptionInfo",
    "Replay",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "ReturnValueError",
    "Rollback",
    "RunConfig",
    "RunFormatError",
    "RunHandle",
    "RunNotFoundError",
    "RunOwnedError",
    "RunStatus",
    "ScalingConfig",
    "TrainContext",
    "TrainRunContext",
    "Trainer",
    "TrainingFailedError",
    "UserCallback",
    "ValidationConfig",
    "ValidationFn",
    "ValidationTaskConfig",
    "backend_names",
    "checkpoint_requested",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "heartbeat",
    "load",
    "make_trainer",
    "report",
]

_NAMES = LazyNames(
    module=__name__,
    homes={
        "polytrain.checkpoint.checkpoint": ("Checkpoint",),
        "polytrain.config.configs": (
            "CheckpointConfig",
            "DataConfig",
            "FailureConfig",
            "RunConfig",
            "ScalingConfig",
        ),
        "polytrain.config.mix": ("Mix",),
        "polytrain.errors": (
            "BadDataError",
            "CheckpointError",
            "DamagedFileError",
            "Failure",
            "FailureKind",
            "NotInWorkerError",
            "PredictionFailedError",
            "ReturnValueError",
            "RunFormatError",
            "RunNotFoundError",
            "RunOwnedError",
            "TrainingFailedError",
        ),
        "polytrain.config.validation_config": (
            "ValidationConfig",
            "ValidationFn",
            "ValidationTaskConfig",
        ),
        "polytrain.ray_names.trainers": ("DataParallelTrainer",),
        "polytrain.api.loading": ("load",),
        "polytrain.api.result": ("Result",),
        "polytrain.api.run_handle": ("RunHandle", "RunStatus"),
        "polytrain.api.trainer": ("Trainer", "make_trainer"),
        "polytrain.events.notices": ("PreemptionInfo", "Rollback"),
        "polytrain.prediction.predict": ("PredictionOutput",),
        "polytrain.ray_names.callbacks": ("TrainRunContext", "UserCallback"),
        "polytrain.record.repetition": ("Replay",),
        "polytrain.workers.session.checkpoint_files": (
            "CheckpointConsistencyMode",
            "CheckpointUploadMode",
            "ReportedCheckpoint",
            "ReportedCheckpointStatus",
        ),
        "polytrain.workers.session.context": ("Context", "TrainContext"),
        "polytrain.workers.session.worker_api": (
            "checkpoint_requested",
            "get_all_reported_checkpoints",
            "get_checkpoint",
            "get_context",
            "get_dataset_shard",
            "get_preemption_info",
            "heartbeat",
            "report",
        ),
        "polytrain_plugins": ("InvalidJobError", "PolytrainError", "backend_names"),
    },
    modules=(
        "collective",
        "data",
        "huggingface",
        "lightgbm",
        "lightning",
        "tensorflow",
        "torch",
        "xgboost",
    ),
)

TRAIN_DATASET_KEY = "train"
"""Name of the data set that backends train on."""


def __getattr__(name: str) -> Any:
    return _NAMES.get(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES.names()})
