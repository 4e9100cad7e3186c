"""Decides where a run's agents run, and how many workers there are. Pure.

They run in the driver on this machine, or on a Ray cluster. Their number is decided at the start,
after a loss, and when there is more room."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from polytrain.config.configs import ScalingConfig
from polytrain.text.described import first_few, numbered, resource_amount
from polytrain_plugins import Problem

STARTING_S = 60.0
"""Seconds for which an elastic run waits for agents that are starting, though it could begin or
grow without them. With each that comes later it is restarted; and a node on which nothing ever
starts must not hold it up."""

NAMED_HOSTS = 8
"""Hosts that a message names; of more, the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """The requested agents that have their resources, and whose processes are starting."""

    hosts: tuple[str, ...] = ()
    """The address of each one's node."""

    setup: str | None = None
    """Description of what Ray sets up for them first; None if it is nothing."""

    def __str__(self) -> str:
        if self.setup is not None:
            return f"Ray sets up {self.setup}"
        return f"Ray is starting processes on {self.nodes} (reserved)"

    @property
    def nodes(self) -> str:
        """The addresses of the nodes, each once; of many, the first."""
        return first_few(sorted(set(self.hosts)), NAMED_HOSTS, of="nodes")


def expected(*, up: int, starting: Starting, waited_s: float, limit_s: float) -> WorkerCount:
    """Decide how many workers a run that could do with fewer waits for."""
    late = len(starting.hosts)
    if late == 0:
        return WorkerCount(
            workers=up, reason=f"no others than {numbered(up, 'worker')} are starting"
        )
    if waited_s < limit_s:
        return WorkerCount(workers=up + late, reason=str(starting))
    reason = f"{late} of {up + late} have not started within {limit_s:g} s, on {starting.nodes}"
    return WorkerCount(workers=up, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCount:
    """A number of workers, and the reason for it."""

    workers: int
    reason: str


def worker_capacity(
    node_totals: Sequence[Mapping[str, float]], demand: Mapping[str, float]
) -> WorkerCount:
    """Count the workers that fit on the nodes if nothing else runs there."""
    needed = {name: amount for name, amount in demand.items() if amount > 0}
    workers = sum(
        min(
            (_units(totals.get(name, 0.0)) // _units(amount) for name, amount in needed.items()),
            default=0,
        )
        for totals in node_totals
    )
    one = " and ".join(resource_amount(*each) for each in needed.items())
    held = "; ".join(
        ", ".join(resource_amount(name, totals.get(name, 0.0)) for name in needed)
        for totals in node_totals
    )
    nodes = numbered(len(node_totals), "node")
    return WorkerCount(
        workers=workers, reason=f"each worker takes {one}; the cluster has {nodes} ({held})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePolicy:
    """Decides the size of a run, between the user's least and most workers."""

    least: int
    most: int
    standby: int = 0
    """Number of agents to keep as spares."""

    def first(self, *, up: int, room: int) -> WorkerCount | None:
        """Return the size of the first attempt; None while agents are still starting.

        Args:
            room: number of workers that had resources when the run began.
        """
        wanted = min(self.most, max(self.least, room))
        if up < wanted:
            return None
        return WorkerCount(workers=wanted, reason=f"{numbered(wanted, 'worker')} ready")

    def after_loss(self, *, size: int, up: int) -> WorkerCount | None:
        """Return the size with which to continue at once; None if too few are left.

        Args:
            up: remaining agents, standbys included.
        """
        workers = min(size, up)
        if workers < self.least:
            return None
        if workers == size:
            return WorkerCount(workers=workers, reason="every lost worker has been replaced")
        return WorkerCount(workers=workers, reason=f"{numbered(workers, 'worker')} of {size} left")

    def after_place(self, *, size: int, up: int) -> WorkerCount | None:
        """Return the size of the attempt that is being placed; None if there are too few agents.

        Args:
            up: running agents, standbys included.
        """
        return self.growth(size=size, up=up) or self.after_loss(size=size, up=up)

    def growth(self, *, size: int, up: int) -> WorkerCount | None:
        """Return the size to grow to at the next checkpoint; None if the run can't grow.

        Args:
            up: running agents, standbys included.
        """
        workers = min(self.most, up - self.standby)
        if workers <= size:
            return None
        return WorkerCount(
            workers=workers, reason=f"there is room for {numbered(workers, 'worker')} now"
        )


class Growth:
    """Decides when a running attempt is restarted with more workers: once for all that start."""

    def __init__(self, sizes: SizePolicy) -> None:
        self._sizes = sizes
        self._since = math.inf
        """Time since which the run could have grown; it waits for others that are starting."""

    @property
    def look_at(self) -> float:
        """The time at which to ask again; infinite if nothing is waited for."""
        return self._since + STARTING_S

    def forget(self) -> None:
        """Begin anew: other workers run, or none."""
        self._since = math.inf

    def wanted(
        self, *, size: int, up: int, starting: Callable[[], Starting], now: float
    ) -> WorkerCount | None:
        """Return the size to grow to now, if any.

        Args:
            up: running agents, standbys included.
            starting: finds those that are starting, if that matters.
        """
        growth = self._sizes.growth(size=size, up=up)
        since = min(self._since, now)
        self._since = math.inf
        if growth is None:
            return None
        worth = expected(up=up, starting=starting(), waited_s=now - since, limit_s=STARTING_S)
        # Those that the run has no use for aren't waited for.
        if self._sizes.growth(size=size, up=worth.workers) == growth:
            return growth
        self._since = since
        return None


def holds(totals: Mapping[str, float], demand: Mapping[str, float]) -> bool:
    """Return whether there are enough resources for one worker."""
    return worker_capacity([totals], demand).workers > 0


def _units(amount: float) -> int:
    """Convert an amount to ten-thousandths, in which Ray counts, without rounding errors."""
    return round(amount * 10_000)


_OF_ONE_MACHINE = frozenset({"CPU", "memory", "GPU"})
"""Resources that a run can assign without Ray; GPUs only if they are NVIDIA's and whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableClusters:
    """The clusters that a run could use; found without starting anything."""

    machine: Mapping[str, float]
    ray_is_initialized: bool
    ray_address: str | None
    """Address of the cluster that was configured or found; None if there is none."""

    ray_datasets: tuple[str, ...]
    function_uses_ray: bool
    validation_uses_ray: bool = False
    validation_options: tuple[str, ...] = ()
    """Options of validations that have no effect without Ray."""

    has_gpu_device: bool
    ray_address_is_named: bool = False
    """Whether the user has named that address, in `RAY_ADDRESS`."""

    runtime_env: tuple[str, ...] = ()
    """Parts of `RunConfig.worker_runtime_env` that only Ray sets up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice:
    """The chosen cluster, and the reason."""

    is_local: bool
    reason: str

    def __str__(self) -> str:
        return f"{'on this machine' if self.is_local else 'on Ray'}: {self.reason}"


def choose_cluster(scaling: ScalingConfig, around: AvailableClusters) -> ClusterChoice:
    """Choose this machine if nothing needs Ray, unless the user chooses.

    Args:
        scaling: the user's configuration. `local_problems` checks whether "local" is possible.
    """
    if scaling.cluster != "auto":
        reason = f"cluster={scaling.cluster!r}"
        if scaling.cluster == "ray" and around.ray_address and not around.ray_is_initialized:
            named = _running_cluster(around.ray_address, is_named=around.ray_address_is_named)
            reason = f"{reason}; {named}"
        return ClusterChoice(is_local=scaling.cluster == "local", reason=reason)
    needs_ray = next(_reasons_for_ray(scaling, around), None)
    return ClusterChoice(is_local=needs_ray is None, reason=needs_ray or "nothing needs a cluster")


def local_problems(scaling: ScalingConfig, around: AvailableClusters) -> Iterator[Problem]:
    """Yield problems that keep the workers from running on this machine without Ray."""
    for name in around.ray_datasets:
        yield Problem(
            field=f"datasets[{name!r}]",
            what="it is a Ray data set, which ScalingConfig(cluster='local') can't read",
            remedy="Pass files or a table, or leave cluster out to use Ray",
        )
    if around.runtime_env:
        yield Problem(
            field="RunConfig.worker_runtime_env",
            what=f"{', '.join(map(repr, around.runtime_env))}: only Ray sets this up, and "
            "cluster='local' doesn't use it",
            remedy="Leave cluster out, or install what is needed on this machine",
        )
    if scaling.placement_strategy == "STRICT_SPREAD" and scaling.min_workers > 1:
        yield Problem(
            field="ScalingConfig.placement_strategy",
            what="STRICT_SPREAD needs a node for every worker, and cluster='local' is one node",
            remedy="Leave one of the two out",
        )
    if scaling.label_selector:
        yield Problem(
            field="ScalingConfig.label_selector",
            what="only Ray's nodes have labels, and cluster='local' doesn't use Ray",
            remedy="Leave one of the two out",
        )
    if around.validation_options:
        yield Problem(
            field="ValidationConfig.ray_remote_kwargs",
            what=f"{', '.join(around.validation_options)}: cluster='local' gives a validation "
            "CPUs only",
            remedy="Leave cluster out, or set it to 'ray': Ray gives a validation what it asks for",
        )
    others = _only_of_ray(scaling, around)
    if others:
        yield Problem(
            field="ScalingConfig.resources_per_worker",
            what=f"{', '.join(others)}: cluster='local' gives workers only CPUs, memory and whole "
            f"NVIDIA GPUs, of which this machine has {around.machine.get('GPU', 0):g}",
            remedy="Leave cluster out, or set it to 'ray': Ray assigns every other resource",
        )
        return
    least = scaling.min_workers + scaling.standby
    capacity = worker_capacity([around.machine], scaling.resources)
    if least > capacity.workers:
        yield Problem(
            field="ScalingConfig.num_workers",
            what=f"{numbered(least, 'worker')} {'is' if least == 1 else 'are'} more than this "
            f"machine can hold ({_has(scaling, around)})",
            remedy=f"{_less(scaling, capacity.workers)}, {_share_cpus(scaling, around)}or use a "
            "Ray cluster: set RAY_ADDRESS, or call ray.init()",
        )


def new_ray_problems(scaling: ScalingConfig, around: AvailableClusters) -> Iterator[Problem]:
    """Yield the workers' demands that a Ray cluster of only this machine can't meet."""
    is_new = not around.ray_is_initialized and around.ray_address is None
    if is_new and scaling.resources.get("GPU", 0) > 0 and not around.has_gpu_device:
        without = "Use use_gpu=False" if scaling.use_gpu else "Leave 'GPU' out of it"
        yield Problem(
            field=f"ScalingConfig.{'use_gpu' if scaling.use_gpu else 'resources_per_worker'}",
            what="this machine has no GPU, and there is no Ray cluster",
            remedy=f"{without}, or use a Ray cluster with GPUs: set RAY_ADDRESS, or call "
            "ray.init()",
        )


def _reasons_for_ray(scaling: ScalingConfig, around: AvailableClusters) -> Iterator[str]:
    if around.ray_is_initialized:
        yield "Ray is initialised"
    if around.ray_address is not None:
        yield _running_cluster(around.ray_address, is_named=around.ray_address_is_named)
    if around.ray_datasets:
        yield f"{around.ray_datasets[0]!r} is a Ray data set"
    if around.runtime_env:
        yield f"worker_runtime_env has {around.runtime_env[0]!r}, which only Ray sets up"
    if around.function_uses_ray:
        yield "the training function uses Ray"
    if scaling.placement_strategy == "STRICT_SPREAD" and scaling.min_workers > 1:
        yield "STRICT_SPREAD needs several nodes"
    if scaling.label_selector:
        yield "label_selector chooses among Ray's nodes"
    if around.validation_uses_ray:
        yield "the validation function uses Ray"
    if around.validation_options:
        yield f"validations request {around.validation_options[0]}, which only Ray assigns"
    others = _only_of_ray(scaling, around)
    if others:
        yield f"workers request {others[0]}, which only Ray assigns"


def _running_cluster(address: str, *, is_named: bool) -> str:
    """Return why a running cluster is joined, and if nobody has named it, how to choose another."""
    if is_named:
        return f"RAY_ADDRESS names the cluster at {address}"
    return (
        f"this machine's newest cluster, at {address}, which ray.init() would join too; "
        "RAY_ADDRESS=local leaves it alone, and RAY_ADDRESS=HOST:PORT names another"
    )


def _only_of_ray(scaling: ScalingConfig, around: AvailableClusters) -> list[str]:
    wanted = (name for name, amount in scaling.resources.items() if amount > 0)
    others = set(wanted) - _OF_ONE_MACHINE
    gpus = scaling.resources.get("GPU", 0)
    if gpus % 1 or (gpus and not around.machine.get("GPU")):
        # Only Ray can share a GPU, or find one that isn't NVIDIA's.
        others.add("GPU")
    return sorted(others)


def _less(scaling: ScalingConfig, capacity: int) -> str:
    """Return advice that makes the workers fit: as many workers as there can be."""
    if capacity == 0:
        return "Lower resources_per_worker"
    workers = min(scaling.min_workers, max(1, capacity - scaling.standby))
    standby = min(scaling.standby, capacity - workers)
    return "Use " + " and ".join(
        [
            *([f"num_workers={workers}"] if workers < scaling.min_workers else []),
            *([f"standby={standby}"] if standby < scaling.standby else []),
        ]
    )


def _share_cpus(scaling: ScalingConfig, around: AvailableClusters) -> str:
    """Return advice if CPUs are missing."""
    needed = scaling.resources.get("CPU", 0) * (scaling.min_workers + scaling.standby)
    if needed <= around.machine.get("CPU", 0):
        return ""
    return "set POLYTRAIN_LOCAL_CPUS to let workers share CPUs, "


def _has(scaling: ScalingConfig, around: AvailableClusters) -> str:
    names = (name for name, amount in scaling.resources.items() if amount > 0)
    return ", ".join(resource_amount(name, around.machine.get(name, 0)) for name in names)
