"""What a backend promises beyond training. The core and the conformance kit use it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Device(StrEnum):
    """Hardware that a backend can train on."""

    CPU = "cpu"
    GPU = "gpu"


class CheckpointKind(StrEnum):
    """Who writes a checkpoint."""

    ONE_RANK = "rank_0"
    """The state is replicated: rank 0's files are the whole checkpoint."""

    EVERY_RANK = "every_rank"
    """The state is sharded: the checkpoint is one directory with the files of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Promises of one backend.

    If a user requests a capability that isn't declared, an error names it. The conformance kit
    tests those that are declared. A capability that adds a method also has a flag here; the kit
    fails a backend whose flag and method disagree.
    """

    declarative: bool = False
    """`Engine.train` exists: the backend trains from its options, with no training function."""

    predictive: bool = False
    """`Engine.predict` or `Engine.predictor` exists: `Result.predict` works, and divides the rows
    among workers."""

    exact_resume: bool = False
    """A run without a training function that was killed and resumed ends in the same files, byte
    for byte, as an uninterrupted one."""

    exact_scaling: bool = False
    """A run without a training function ends in the same files, byte for byte, at any number of
    workers."""

    virtual_workers: bool = False
    """Training functions can train with `ScalingConfig.virtual_workers`."""

    checkpoint: CheckpointKind = CheckpointKind.ONE_RANK
    """Who writes a checkpoint."""

    devices: frozenset[Device] = frozenset({Device.CPU})
    """Devices that a worker may use."""
