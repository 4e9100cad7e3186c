"""The driver half of a backend: its options, their checks, what it promises, and what it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from polytrain_plugins.engine import Engine
from polytrain_plugins.errors import Problem
from polytrain_plugins.shard import DatasetInfo

CONTRACT_VERSION = 1
"""Version of the contract: of everything in this package that a backend uses."""


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

    def __post_init__(self) -> None:
        # A name is equal to a member, but isn't the same object.
        given: Any = self.devices
        devices = (given,) if isinstance(given, str) else given
        object.__setattr__(self, "checkpoint", _member(CheckpointKind, self.checkpoint))
        object.__setattr__(self, "devices", frozenset(_member(Device, each) for each in devices))


def _member(kind: type[StrEnum], value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{kind.__name__}.{each.name}" for each in kind)
        raise TypeError(f"Capabilities: {value!r} is unknown. Give one of: {known}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The parts of a user's request that a backend may need."""

    num_workers: int
    """Ranks of the world; 1 when the run is inline."""

    use_gpu: bool
    cpus_per_worker: int
    has_training_function: bool
    datasets: Mapping[str, DatasetInfo]

    virtual_workers: int | None = None
    """`ScalingConfig.virtual_workers`."""

    is_in_this_environment: bool = False
    """Whether workers are known to import what is installed here. Nodes of a cluster may have
    different packages, and `RunConfig.worker_runtime_env` may install some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What each worker's process needs."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set before the process starts, unless the user has set them."""

    preload: tuple[str, ...] = ()
    """Modules that are imported once per node; every worker process inherits them. They must not
    start a thread or use a device, because such a process can't be forked safely."""

    whole_datasets: frozenset[str] = frozenset()
    """Data sets that every rank gets whole instead of in shards."""

    reads_tables: bool = False
    """Whether training takes a shard as one table, not in batches. Agents then hold it in shared
    memory, and a restarted worker process maps it instead of reading it again."""

    ports: int = 0
    """Ports at which each rank listens, of those in `Member.ports`."""

    leader_ports: int = 0
    """Further ones at which rank 0 listens."""

    group: str | None = None
    """Column of the sharded data sets whose equal values stay together on one rank."""

    complete: Mapping[str, str] = field(default_factory=dict)
    """Option → column in which every row needs a value. Of data in memory this is checked before
    any worker starts; the engine checks all others."""

    def __post_init__(self) -> None:
        kinds: Mapping[str, Any] = {"preload": tuple, "whole_datasets": frozenset}
        for name, kind in kinds.items():
            given: Any = getattr(self, name)
            # A text would be taken for its letters.
            names = [None] if isinstance(given, str) else [*given]
            if not all(isinstance(each, str) for each in names):
                raise TypeError(f"Demand({name}={given!r}): give a {kind.__name__} of names")
            object.__setattr__(self, name, kind(names))
        for option, texts in (("environment", self.environment), ("complete", self.complete)):
            for name, value in texts.items():
                if not isinstance(value, str):
                    raise TypeError(f"Demand({option}={{{name!r}: {value!r}}}): give a str")
        for option, count in (("ports", self.ports), ("leader_ports", self.leader_ports)):
            if type(count) is not int or count < 0:
                raise TypeError(f"Demand({option}={count!r}): give a number, 0 or more")


class Backend(ABC):
    """One framework. A subclass is a frozen dataclass whose fields *are* the user's options.

    It is used in the driver and sent to the workers, so it can be pickled, and its module imports
    no framework. It needs no code for failures: a broken attempt is killed and started again.
    """

    name: ClassVar[str]
    """What the user types: `make_trainer(name, …)`. The same as the entry point's name."""

    contract_version: ClassVar[int]
    """The `CONTRACT_VERSION` that the backend was written for, as a literal number."""

    capabilities: ClassVar[Capabilities]

    requires: ClassVar[Mapping[str, str]] = {}
    """Importable module → the command that installs it. Checked before any worker starts."""

    mutable_on_resume: ClassVar[frozenset[str]] = frozenset()
    """Options that may change when an unfinished run is resumed, such as its length. A change of
    any other option is rejected."""

    prediction_batch_size: ClassVar[int | None] = None
    """Rows that the engine predicts at once, unless the user passes `batch_size`; None for as many
    as are read at once."""

    mutable_prediction_options: ClassVar[frozenset[str]] = frozenset()
    """Options of `Result.predict` that may change when unfinished predictions are resumed."""

    def problems(self, job: Job) -> Iterable[Problem]:
        """Everything that is wrong with the options for this job. Never raises; none by default."""
        return ()

    def prediction_problems(
        self, options: Mapping[str, Any], data: DatasetInfo
    ) -> Iterable[Problem]:
        """Everything that is wrong with the options of `Result.predict`. None by default.

        Args:
            options: what the user passed besides the arguments that all backends share.
            data: the rows to predict.
        """
        return ()

    def demand(self, job: Job) -> Demand:
        """What each worker's process needs. Nothing by default."""
        return Demand()

    @property
    def total_steps(self) -> int | None:
        """Declarative training: the last step, if training doesn't end early; None if unknown.

        With it, progress is shown with the time that is left.
        """
        return None

    def program(self, *, max_failures: int) -> Callable[[], Any] | None:
        """What workers run in place of a training function, if the options name it: a script.

        None by default. Never raises: `problems` says what is wrong with the options.

        Args:
            max_failures: the most failures after which the run restarts; below 0 for any number.
        """
        return None

    @abstractmethod
    def engine(self) -> Engine[Any]:
        """The engine. Called in the worker process, and by `Result.load_model`; it may import the
        framework."""
