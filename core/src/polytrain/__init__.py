"""polytrain: one distributed trainer for every framework, on Ray.

Importing this package imports neither Ray nor a framework.
"""

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain.errors import (
    CheckpointError,
    Failure,
    FailureKind,
    NotInTrainerError,
    TrainingFailedError,
)
from polytrain.result import Result
from polytrain.trainer import Trainer, make_trainer
from polytrain.workers.session import (
    Context,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    report,
)
from polytrain_plugins import InvalidJobError, PolytrainError, backend_names

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointError",
    "Context",
    "Failure",
    "FailureConfig",
    "FailureKind",
    "InvalidJobError",
    "NotInTrainerError",
    "PolytrainError",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "Trainer",
    "TrainingFailedError",
    "backend_names",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "make_trainer",
    "report",
]
