"""The contract of a polytrain backend: everything that a backend's author needs to know.

Importing this package imports pluggy and the standard library, no framework and no Ray.
"""

from polytrain_plugins.backend import (
    CONTRACT_VERSION,
    Backend,
    Capabilities,
    CheckpointKind,
    Demand,
    Device,
    Job,
)
from polytrain_plugins.engine import Engine, Predictions, Session
from polytrain_plugins.environment import changed_environment, nccl_variables
from polytrain_plugins.errors import (
    AmbiguousBackendError,
    BackendImportError,
    ContractVersionError,
    InvalidJobError,
    PolytrainError,
    Problem,
    RegistryError,
    UnknownBackendError,
    UnsupportedCapabilityError,
)
from polytrain_plugins.events import (
    Attempt,
    CheckpointInfo,
    FailureInfo,
    Outcome,
    Report,
    RunInfo,
    Stopped,
)
from polytrain_plugins.hookspecs import hookimpl
from polytrain_plugins.ports import HeldPort, held_port, listening_socket, reached_at
from polytrain_plugins.problems import (
    column_remedy,
    is_category,
    is_instance_of,
    is_number,
    missing_columns,
    needed_without_function,
    number_problems,
    options_beside_function,
    timeout_problems,
    unknown_name,
)
from polytrain_plugins.registry import backend_names, load_backend
from polytrain_plugins.shard import (
    Batches,
    BatchesAhead,
    BatchFormat,
    DatasetInfo,
    Shard,
    ShardView,
)
from polytrain_plugins.virtual_workers import MicroBatch, VirtualBatch, virtual_workers_of
from polytrain_plugins.world import Member, Offer, World

__all__ = [
    "CONTRACT_VERSION",
    "AmbiguousBackendError",
    "Attempt",
    "Backend",
    "BackendImportError",
    "BatchFormat",
    "Batches",
    "BatchesAhead",
    "Capabilities",
    "CheckpointInfo",
    "CheckpointKind",
    "ContractVersionError",
    "DatasetInfo",
    "Demand",
    "Device",
    "Engine",
    "FailureInfo",
    "HeldPort",
    "InvalidJobError",
    "Job",
    "Member",
    "MicroBatch",
    "Offer",
    "Outcome",
    "PolytrainError",
    "Predictions",
    "Problem",
    "RegistryError",
    "Report",
    "RunInfo",
    "Session",
    "Shard",
    "ShardView",
    "Stopped",
    "UnknownBackendError",
    "UnsupportedCapabilityError",
    "VirtualBatch",
    "World",
    "backend_names",
    "changed_environment",
    "column_remedy",
    "held_port",
    "hookimpl",
    "is_category",
    "is_instance_of",
    "is_number",
    "listening_socket",
    "load_backend",
    "missing_columns",
    "nccl_variables",
    "needed_without_function",
    "number_problems",
    "options_beside_function",
    "reached_at",
    "timeout_problems",
    "unknown_name",
    "virtual_workers_of",
]
