"""What a backend promises beyond training: facts that the core and the conformance kit act on."""

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
    """The state is replicated: what rank 0 reports is the whole checkpoint."""

    EVERY_RANK = "every_rank"
    """The state is sharded: the checkpoint is one directory with the parts of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Promises of one backend.

    A promise that isn't declared is refused by name when a user asks for it; one that is declared
    is tested by the conformance kit. A capability that adds a method stands here as a flag too, and
    the kit fails a backend whose flag and method disagree.
    """

    declarative: bool = False
    """`Engine.train` exists: the backend trains from its options, with no training function."""

    predictive: bool = False
    """`Engine.predict` exists: `Result.predict` has all workers predict, each some rows."""

    exact_resume: bool = False
    """A run from the backend's options that was killed and went on ends in the same files, byte for
    byte, as one that wasn't."""

    exact_scaling: bool = False
    """A run from the backend's options ends in the same files, byte for byte, at any number of
    workers."""

    checkpoint: CheckpointKind = CheckpointKind.ONE_RANK
    """Who writes a checkpoint."""

    devices: frozenset[Device] = frozenset({Device.CPU})
    """Devices that a worker may be given."""
