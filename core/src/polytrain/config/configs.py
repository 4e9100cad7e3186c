"""What a user configures about a run. Shared features have Ray Train's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from polytrain.config.constraints import (
    Checked,
    Config,
    Entries,
    Function,
    Seconds,
    Whole,
    column_names,
    copies,
    directory_name,
    divergence_rules,
    metric_name,
    node_labels,
    resource_amounts,
    storage_place,
    worker_count,
)
from polytrain.config.listening import network_name, port_range
from polytrain.config.ray_arguments import (
    CHECKPOINT,
    DATA,
    FAILURE,
    RUN,
    SCALING,
    takes_ray_arguments,
)
from polytrain_plugins import Report

_LEAST_WINDOW_S = 0.1
"""Stragglers: the kernel counts in ticks, of up to ten milliseconds."""


@takes_ray_arguments(**SCALING)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScalingConfig(Config):
    """How many workers, and what each of them gets."""

    num_workers: Annotated[int | tuple[int, int], Checked(worker_count)] = 1
    """Worker processes. 0 trains inline, in the process that calls `fit()`. Two numbers are the
    least and the most: the run starts with as many as there are resources for, shrinks after a
    loss and grows when there are more resources."""

    virtual_workers: Annotated[
        int | None,
        Whole(of="virtual workers", least=1, remedy="Give the most workers, or more, or None"),
    ] = None
    """Parts of each global batch that are computed apart and added in a fixed order, so that a
    network has the same weights, to the bit, at any number of workers up to this one; see
    docs/reproducible-networks.md. A power of two costs least. It can't change during a run."""

    standby: Annotated[int, Whole(of="standbys", least=0, remedy="Give 0 or more")] = 0
    """Agents that are kept ready to replace a lost one, on other nodes if there are any. Each
    reserves the resources of a worker."""

    use_gpu: bool = False
    """Give every worker one GPU, or as many as `resources_per_worker` says."""

    resources_per_worker: Annotated[Mapping[str, float] | None, Entries(resource_amounts)] = None
    """Ray resources of one worker, for example `{"CPU": 4, "GPU": 1}`. One CPU by default."""

    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How the workers are placed on nodes, in Ray's words."""

    accelerator_type: str | None = None
    """Type of the nodes' accelerators, in Ray's words, such as "A100"; workers run on no others."""

    label_selector: Annotated[
        Mapping[str, str] | Sequence[Mapping[str, str]] | None, Checked(node_labels)
    ] = None
    """Labels that Ray's nodes must have, such as `{"ray.io/market-type": "spot"}`; also
    `"!value"`, `"in(one,two)"` and `"!in(one,two)"`. A list has one for each worker, of a run with
    a fixed number of them and no standbys."""

    start_timeout_s: Annotated[float, Seconds()] = 600.0
    """Seconds to wait for the cluster to free the workers' resources."""

    cluster: Literal["auto", "local", "ray"] = "auto"
    """Where the workers are. "local": on this machine, without Ray. "ray": on Ray's nodes. "auto":
    on Ray if Ray is initialised, if `RAY_ADDRESS` names a cluster or one was started on this
    machine, if a data set is a Ray data set or the training function uses Ray, or if something is
    requested that only Ray assigns, such as labels; otherwise on this machine."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
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
        if self.accelerator_type is not None:
            # Ray gives each node a resource of this name; any amount binds a worker to it.
            resources.setdefault(f"accelerator_type:{self.accelerator_type}", 0.001)
        return resources

    def label_selector_of(self, worker: int) -> Mapping[str, str]:
        """Return the label selector of one worker.

        Args:
            worker: its number; not its rank, which depends on its node.
        """
        given = self.label_selector
        if given is None or isinstance(given, Mapping):
            return given or {}
        return given[worker]

    @property
    def label_selectors(self) -> tuple[Mapping[str, str], ...]:
        """All label selectors, each once; empty if workers may be on any node."""
        given = [self.label_selector_of(worker) for worker in range(self.max_workers)]
        each_once = {tuple(sorted(selector.items())): selector for selector in given}
        return tuple(each_once.values()) if any(given) else ()

    @property
    def cpus_per_worker(self) -> int:
        """Threads that a worker may use, at least 1."""
        return max(1, int(self.resources["CPU"]))

    @property
    def gpus_per_worker(self) -> int:
        """GPUs that a worker sees. A worker with a part of a GPU sees one."""
        return math.ceil(self.resources.get("GPU", 0))


@takes_ray_arguments(**DATA)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DataConfig(Config):
    """What is read of a data set, and in which order."""

    datasets_to_split: str | Sequence[str] = "all"
    """"all", or the names of the data sets whose rows are split over the workers. Every worker
    reads the others whole."""

    shuffle: bool | Literal["window"] = False
    """Whether the order of the rows is random, and new in each epoch. True: a full shuffle; if the
    data are in files, each worker holds its part in memory. "window": windows of rows in random
    order, and the rows of a window in random order; files are read a few row groups at a time."""

    seed: Annotated[
        int,
        Whole(least=-(2**63), most=2**63 - 1, remedy="Give a whole number of 64 bits"),
    ] = 0
    """The same seed gives the same order, on any number of workers with which a run resumes. New
    runs on different numbers of workers have the same order of rows in memory and of items; of
    files if `shards` is given, or if both numbers divide 8 and the rows are shuffled in memory
    (`shuffle=True`, or CSV and JSON Lines)."""

    shards: Annotated[int | None, Whole(of="shards", least=1, remedy="Give 1 or more, or None")] = (
        None
    )
    """Consecutive parts of the data that batches take rows from in turn. By default 1 if the rows
    are in memory, or are items; of files as many as the run has workers when it begins, one for
    each, or 8 if agents hold shuffled rows and the number of workers divides 8. The same number
    gives the same order on any number of workers. Workers share the shards: with fewer shards than
    workers each reads more rows than it uses, with many more a worker holds windows of many shards
    at once."""

    remainder: Literal["keep", "pad", "drop"] = "keep"
    """What happens to rows that don't fill a batch. "keep": they are the last batch, which is
    smaller; so that each worker has a row, the one before it may leave it some. "pad": rows from
    the epoch's start fill the last batch. "drop": they are left out."""

    columns: Annotated[Sequence[str] | None, Checked(column_names)] = None
    """Columns to read; by default all but those that hold the index of a DataFrame."""

    transform: Annotated[
        Callable[..., Mapping[str, Any]] | None,
        Function("Pass a function from a dict of arrays to another"),
    ] = None
    """Applied to rows when they are read. It takes a dict of column name to array, and returns one
    with the same number of rows. It runs wherever data is read, also in agents. With a parameter
    `rng` it is applied to each batch of each epoch instead, and gets a NumPy generator that is
    seeded by `seed`, the epoch, the batch's place in it and the rank."""

    pack: Annotated[int | None, Whole(of="tokens", least=1, remedy="Give 1 or more, or None")] = (
        None
    )
    """Tokens in a row: the lists in all columns that are read (after `transform`) are joined in the
    order of the data, over the whole data set, and cut into rows of this length, which are then
    shuffled. The column `position_ids` counts from 0 at the start of each list, and of each row.
    The last tokens, fewer than a row, are left out. All lists are read once before the run."""

    group: str | None = None
    """Rows with the same value in this column stay together, on one worker and in one batch. They
    must be consecutive. Batch sizes then count groups."""

    window_rows: Annotated[
        int | None, Whole(of="rows", least=1, remedy="Give 1 or more, or None")
    ] = None
    """Rows in a window of `shuffle="window"`; by default as many as the largest row group, and
    at least 8,192, or 32 MB if that is less. Row groups that have several windows are kept decoded,
    up to 128 MB for each worker; others are read from their start for each of their windows."""


@takes_ray_arguments(**FAILURE)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FailureConfig(Config):
    """What to do when something fails."""

    max_failures: Annotated[
        int, Whole(of="failures", least=-1, remedy="Give 0 or more, or -1 for any number")
    ] = 0
    """Failed attempts in a row that the run survives; -1 for any number. The count begins again
    with each reported checkpoint that was committed since the failure before. Preemptions don't
    count, and neither do the first five attempts in a row that end because a node which has joined
    the run can't begin."""

    retry_user_errors: bool | Literal["unless_repeated"] = "unless_repeated"
    """Whether exceptions of the training function are retried. By default they are, unless the same
    error comes again without progress, or every rank raises the same exception at once and its
    type says that it is a bug. False never retries them; True always, within `max_failures`."""

    on_divergence: Literal["rollback", "fail"] | None = None
    """What happens if a report shows that training diverges. "fail" ends the run. "rollback" goes
    back to the newest checkpoint before the last good report, and leaves out the global batches
    that were read between that report and the bad one: in the same epoch they never come again.
    None does nothing. Checkpoints made after the last good report don't count in either case."""

    divergence: Annotated[
        str | Sequence[str] | Mapping[str, float] | Callable[..., bool] | None,
        Checked(divergence_rules),
    ] = None
    """What counts as divergence: a value that is NaN or infinite, in a report of any rank. By
    default of any metric; or of those named here, `a/b` for a nested one. `{"loss": 4}` adds: a
    loss of rank 0 above 4 times the median of its last 100 reports, from the eleventh on. Or a
    function, which alone decides: it takes the list of rank 0's last 101 reports, the newest last,
    and returns whether that one is bad."""

    max_rollbacks: Annotated[int, Whole(of="rollbacks", least=0, remedy="Give 0 or more")] = 5
    """Rollbacks of the run, over all calls of `fit()`. One more divergence ends it. They don't
    count towards `max_failures`."""

    on_rollback: Annotated[
        Callable[..., Any] | None,
        Function("Pass a function of the configuration and the rollback"),
    ] = None
    """Called in the driver at each rollback, with the current `train_loop_config` and a
    `Rollback`; it returns the one for the next attempts, for example with a lower rate. No batch is
    left out then. Without a training function, it takes and returns the backend's `params`; a
    backend without them can't roll back. A run that is resumed calls it again for each earlier
    rollback, in order, from the original values: it has to return the same."""

    hang_timeout_s: Annotated[
        float | None, Seconds(above=True, or_none="to turn hang detection off")
    ] = 300.0
    """Seconds without progress on a rank after which the stacks of all ranks are logged; None turns
    this off. Progress is a batch, a report, a boosting round, or a call of `heartbeat()`."""

    hang_action: Literal["kill_if_idle", "kill", "warn"] = "kill_if_idle"
    """What happens if a rank makes no progress, besides a warning with every rank's stacks.
    "kill_if_idle" ends the attempt if no rank has made progress or used CPU time, or if the process
    is stopped. "kill" always ends it, "warn" never."""

    load_timeout_s: Annotated[float, Seconds()] = 3600.0
    """Seconds that each attempt may take to read the rows that agents hold, and to fetch the
    checkpoint that it starts from. What worker processes read while they train isn't meant."""

    rendezvous_timeout_s: Annotated[float, Seconds()] = 300.0
    """Seconds that the ranks may take from their start until all have joined."""

    stragglers: Literal["report", "replace", "ignore"] = "report"
    """What happens to a rank that all others wait for. "replace" moves it to a standby after the
    next checkpoint, and needs `ScalingConfig(standby=…)`; a rank is moved once."""

    straggler_window_s: Annotated[float, Seconds(least=_LEAST_WINDOW_S)] = 30.0
    """Length of the window in which each rank's work and wait are measured, in seconds. A rank that
    works for most of two windows in a row, while the others mostly wait, is a straggler."""

    node_cooldown_s: Annotated[float, Seconds()] = 600.0
    """Seconds for which a node gets no workers after it has lost two, if other nodes have room."""

    @property
    def skips_bad_batches(self) -> bool:
        """Whether a rollback leaves batches out."""
        return self.on_divergence == "rollback" and self.on_rollback is None


@takes_ray_arguments(**CHECKPOINT)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckpointConfig(Config):
    """Which checkpoints are made and kept."""

    num_to_keep: Annotated[
        int | None, Whole(of="checkpoints", least=1, remedy="Give 1 or more, or None to keep all")
    ] = None
    """Keep this many of the best; None keeps all. The newest is always kept."""

    checkpoint_score_attribute: Annotated[str | None, Checked(metric_name)] = None
    """Metric that ranks checkpoints, `a/b` for a nested one. With None, newer is better."""

    checkpoint_score_order: Literal["max", "min"] = "max"

    checkpoint_frequency: Annotated[
        int, Whole(of="rounds", least=0, remedy="Give 1 or more, or 0 to save at the end only")
    ] = 0
    """Declarative training: save every this many rounds; 0 saves at the end only."""

    written_by: Literal["rank_0", "every_rank"] | None = None
    """Whose files a checkpoint consists of: rank 0's, if the state is the same on every rank, or
    every rank's, merged into one directory. By default what the backend declares; if that is
    rank 0, files that other ranks report are added."""

    upload: Literal["async", "sync"] = "async"
    """Whether a report waits until its checkpoint is committed."""

    max_in_flight: Annotated[int, Whole(of="checkpoints", least=1, remedy="Give 1 or more")] = 2
    """Maximum number of checkpoints that are uploaded while training continues; further reports
    block."""

    memory: Annotated[Literal["auto"] | int | None, Checked(copies)] = None
    """Copy the training's state to the node's temporary directory while it trains, whose files are
    in memory first; with ranks on several hosts, to another one too. After a failure the run
    continues from the newest copy, if that is newer than its last checkpoint and no other worker
    has the state. A number is that of steps (rounds of boosters) from copy to copy; with "auto",
    copies take at most 3 % of the time. It is for loops with torch's `TrainingState`; with
    one worker also for Keras's `fit`, and for XGBoost and LightGBM from options."""

    report_timeout_s: Annotated[float, Seconds()] = 600.0
    """If every rank writes: seconds that a rank may be behind after another rank has reported its
    next checkpoint, has ended, or waits for the commit of this one."""


@takes_ray_arguments(**RUN)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunConfig(Config):
    """Where a run is stored, and how failures, checkpoints and observers are handled."""

    name: Annotated[str | None, Checked(directory_name)] = None
    """Name of the run and of its directory; made from the backend and the time by default.
    `fit()` with the same name and storage resumes the run."""

    if_finished: Literal["return", "error", "new"] | None = None
    """What `fit()` does if the run of this name is finished. "return": returns its result, and
    trains nothing. "error": raises `InvalidJobError`. "new": trains again; earlier checkpoints stay
    in the directory and are ignored. By default it returns the result; if the training function,
    its config, the backend's options, a data set or `restore_from` has changed since, it raises
    `InvalidJobError`."""

    storage_path: Annotated[str | Path | None, Checked(storage_place)] = None
    """Directory or address of all runs, reachable from every node: a directory that all nodes
    mount, or an address such as `s3://bucket/runs`. `~/polytrain_results` by default."""

    storage_filesystem: Any = field(default=None, repr=False)
    """File system of `storage_path`, if that is neither a local path nor an address: a
    `pyarrow.fs.FileSystem`, or one of fsspec's."""

    storage_timeout_s: Annotated[float, Seconds()] = 600.0
    """Seconds for which storage that is unavailable or full is retried before the attempt fails."""

    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)

    stop: Mapping[str, float | str] | Callable[[Report], bool] | None = field(
        default=None, repr=False
    )
    """Conditions on the reports of rank 0; the first that is met finishes the run. Either limits:
    `{"training_iteration": 100, "loss": 0.1}` ends it at step 100, counted over all restarts, or
    once the loss is 0.1 or less. A number alone is the value to reach: from above for a metric
    whose name says loss or error, or by which checkpoints are ranked with "min"; from below for any
    other, as in Ray Tune. `"<= 0.1"` and `">= 100"` say it themselves. `a/b` names a nested metric;
    metrics of a validation count too. Or a function of a `Report` that returns whether to end the
    run: it is called in rank 0's worker process, and what it keeps is lost with an attempt. The run
    ends with the checkpoint of this report, or else with the next one; `Result.stopped` says why.
    The next `fit()` returns the result, or resumes the run if the conditions of that call aren't
    met and `if_finished` isn't set."""

    time_budget_s: Annotated[float | None, Seconds(above=True, or_none="for no limit")] = None
    """Seconds of training, after which the run is finished with its next checkpoint: over all
    restarts and calls of `fit()`. Steps that are repeated and waits for checkpoints count; starts,
    loading data, waiting for nodes and the time in which the machine is suspended don't."""

    observers: tuple[Any, ...] = ()
    """Objects with hooks of `polytrain_plugins.hookspecs.ObserverHooks`, and trackers of
    `polytrain.trackers`."""

    track: str | Sequence[str] | None = None
    """Trackers with their defaults, by name: "csv", "mlflow", "tensorboard", "wandb"; several in a
    tuple."""

    keep_reports: Literal["rank_0", "every_rank"] = "rank_0"
    """Whose reports are kept in the run's journal, for `Result.histories`. Rank 0's are
    `Result.history` in any case."""

    digests: Annotated[
        int | None, Whole(of="steps", least=1, remedy="Give 1 or more, or None to keep none")
    ] = None
    """Keep a digest of each tensor of rank 0's state in the journal, at the reports of every this
    many steps, so that `Result.replay` names the first tensor that differs. The state is what
    torch's `TrainingState` holds, or the model of a backend that trains without a function; of
    other training functions there are no digests. 100 MB of tensors take 35 ms.

    With torch an attempt also ends where the weights in DDP differ between ranks when a
    `TrainingState` is saved, and the rank's node is left; without digests that is a warning."""

    callbacks: tuple[Any, ...] = field(default_factory=tuple)
    """Objects of subclasses of `UserCallback`, with Ray Train's methods. While there are any, the
    reports of all ranks are sent to the driver."""

    worker_runtime_env: Mapping[str, Any] | None = field(default=None, repr=False)
    """Runtime environment of worker processes and of validations, as Ray takes it:
    `{"env_vars": {"NAME": "value"}}` sets variables before anything is imported, on Ray and without
    it. Ray sets up every other part (`pip`, `working_dir` and `py_modules` at addresses, …)."""

    ports: Annotated[int | str | None, Checked(port_range)] = None
    """Ports at which ranks may listen, the same on every node: one, such as 30000, or the first and
    the last, such as "30000-30100". By default the operating system chooses. The ranks of a node
    share them. Sockets for which a framework takes no port aren't bounded: torch's gloo, NCCL, and
    those of XGBoost's ranks."""

    network_interface: Annotated[str | None, Checked(network_name)] = None
    """Network over which ranks of several nodes connect, if the nodes have several: the name of an
    interface, such as "eth1", or a subnet, such as "10.1.0.0/16", if names differ among nodes. By
    default the one with the address by which Ray knows a node."""

    preflight: Literal["links", "off"] = "links"
    """What is tried before the first worker starts, on Ray and with workers on several nodes.
    "links": each two of up to 16 nodes connect to each other over TCP, of more nodes each to a few;
    a connection that fails ends the run within two seconds, and names both nodes. "off": nothing;
    ranks that can't connect fail after `FailureConfig.rendezvous_timeout_s`."""

    progress: Literal["auto", "live", "plain", "json", "none"] | bool = "auto"
    """How the run's progress is shown on standard error. "live": two lines that stay at the bottom
    of the terminal; "plain" where that isn't one. "plain": a line for each event, and one of the
    state, ever more rarely. "json": JSON Lines, for programs. "auto" and True: live on a terminal,
    one output that is replaced in a notebook, else plain. "none" and False: not at all."""

    show_output: Literal["all", "rank_0", "none"] = "all"
    """Whose output is shown while the run lasts. All of it is in the run's `logs` in any case. What
    an inline run prints is always shown."""
