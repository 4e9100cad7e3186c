"""What a user configures about a run, in Ray Train's names and meanings where both have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """How many workers, and what each of them gets."""

    num_workers: int | tuple[int, int] = 1
    """Worker processes. 0 trains inline, in the process that calls `fit()`. Two numbers are the
    least and the most: the run starts with as many as there are resources for, and shrinks and
    grows with them."""

    standby: int = 0
    """Agents that are kept ready to take the place of a lost one, on other nodes where there are
    some. Each holds the resources of a worker."""

    use_gpu: bool = False
    """Give every worker one GPU, or as many as `resources_per_worker` says."""

    resources_per_worker: Mapping[str, float] | None = None
    """Ray resources of one worker, for example `{"CPU": 4, "GPU": 1}`. One CPU by default."""

    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How the workers are placed on nodes, in Ray's words."""

    start_timeout_s: float = 600.0
    """Seconds to wait for the cluster to free the workers' resources."""

    cluster: Literal["auto", "local", "ray"] = "auto"
    """Where the workers are. "local": on this machine, without Ray. "ray": on Ray's nodes. "auto":
    on Ray if it is initialised, if a cluster is named by `RAY_ADDRESS` or was started on this
    machine, if a data set or the training function is Ray's, or if workers take more than CPUs and
    memory; otherwise on this machine."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change while the run goes on."""
        return self.min_workers < self.max_workers

    @property
    def min_workers(self) -> int:
        """The least number of worker processes."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """The greatest number of worker processes."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def resources(self) -> dict[str, float]:
        """Ray resources of one worker, in full."""
        resources = {"CPU": 1.0, **(self.resources_per_worker or {})}
        if self.use_gpu:
            resources.setdefault("GPU", 1.0)
        return resources

    @property
    def cpus_per_worker(self) -> int:
        """Threads that a worker may use, at least 1."""
        return max(1, int(self.resources["CPU"]))

    @property
    def gpus_per_worker(self) -> int:
        """GPUs that a worker sees: one where it shares one with others."""
        return math.ceil(self.resources.get("GPU", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is read of a data set, and in which order."""

    shuffle: bool | Literal["window"] = False
    """Order of the rows, which is another one in every epoch. True: any row may come anywhere; of
    files, each worker then holds its share in memory. "window": windows of rows in any order, and
    the rows of a window in any order; files are read a few row groups at a time."""

    seed: int = 0
    """The same seed gives the same order, on any number of workers."""

    remainder: Literal["keep", "pad", "drop"] = "keep"
    """What becomes of rows that fill no batch. "keep": batches are as even as can be. "pad": the
    last batch is filled up with rows from the epoch's start. "drop": they are left out."""

    columns: Sequence[str] | None = None
    """Columns to read; all by default."""

    transform: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    """Applied to rows when they are read: dict of column name to array, to another of as many
    rows. It runs wherever data is read, in agents too."""

    group: str | None = None
    """Column whose equal values stay together: on one worker, and in one batch. Rows of a group
    lie one after another; batch sizes then count groups."""

    window_rows: int | None = None
    """Rows in a window of `shuffle="window"`; by default as many as the largest row group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """What to do when something fails."""

    max_failures: int = 0
    """Failed attempts to recover from; -1 for any number. Preemptions aren't counted."""

    retry_user_errors: bool | Literal["unless_repeated"] = "unless_repeated"
    """Whether an exception of the training function is a failure to recover from. By default it is,
    once: the same at the same step again, or on every rank at once, will come again."""

    hang_timeout_s: float | None = 300.0
    """Seconds without progress after which a rank is looked into; None never does. Progress is a
    batch, a report, a boosting round, or a call of `heartbeat()`."""

    hang_action: Literal["kill_if_idle", "kill", "warn"] = "kill_if_idle"
    """What is done about a rank without progress, besides a warning with what every rank is doing.
    "kill_if_idle" ends the attempt if it can't be working: no rank has made progress or spent CPU
    time, or the process is stopped. "kill" ends it in any case, "warn" in none."""

    rendezvous_timeout_s: float = 300.0
    """Seconds that the ranks may take from their start until all have met."""

    stragglers: Literal["report", "replace", "ignore"] = "report"
    """What is done about a rank that all others wait for. "replace" gives its place to a standby
    after the next checkpoint, and needs `ScalingConfig(standby=…)`; a rank is moved once."""

    straggler_window_s: float = 30.0
    """Seconds over which it is measured who works and who waits. A rank that works most of two such
    windows, while the others mostly wait, is a straggler."""

    node_cooldown_s: float = 600.0
    """Seconds for which a node gets no workers after it has lost two, if others can hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Which checkpoints are made and kept."""

    num_to_keep: int | None = None
    """Keep this many of the best; None keeps all. The newest is always kept."""

    checkpoint_score_attribute: str | None = None
    """Metric that ranks checkpoints, `a/b` for a nested one; None ranks the newer better."""

    checkpoint_score_order: Literal["max", "min"] = "max"

    checkpoint_frequency: int = 0
    """Declarative training: save every this many rounds; 0 saves at the end only."""

    written_by: Literal["rank_0", "every_rank"] | None = None
    """Whose files a checkpoint consists of: rank 0's, where the state is the same on every rank, or
    every rank's, merged into one directory. By default as the backend declares."""

    upload: Literal["async", "sync"] = "async"
    """Whether a report waits until its checkpoint is committed."""

    max_in_flight: int = 2
    """Checkpoints that may be on their way to the storage while training goes on; a report with
    one more waits."""

    report_timeout_s: float = 600.0
    """Where every rank writes a part: seconds that one may be behind after another has gone on to
    its next checkpoint, has ended, or waits for this one to be committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Where a run lives, and what happens around it."""

    name: str | None = None
    """Name of the run and of its directory; made from the backend and the time by default. The
    same name and storage go on with a run."""

    if_finished: Literal["return", "error", "new"] | None = None
    """What `fit()` does where the run of this name is finished. "return": returns its result, and
    trains nothing. "error": raises `InvalidJobError`. "new": trains again; the earlier checkpoints
    stay where they are, and don't count. By default it returns the result, unless the training
    function, its configuration, the backend's options or a data set isn't what the run was trained
    with: then it raises."""

    storage_path: str | Path | None = None
    """What holds runs, reachable from every node: a directory that all of them mount, or an address
    such as `s3://bucket/runs`. `~/polytrain_results` by default."""

    storage_filesystem: Any = field(default=None, repr=False)
    """What `storage_path` is a path on, if it is neither of this machine nor an address: a
    `pyarrow.fs.FileSystem`, or one of fsspec's."""

    storage_timeout_s: float = 600.0
    """Seconds that the storage may be out before the run fails."""

    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)

    observers: tuple[Any, ...] = ()
    """Objects with hooks of `polytrain_plugins.hookspecs.ObserverHooks`."""

    progress: bool = True
    """Show a line of progress on standard error."""
