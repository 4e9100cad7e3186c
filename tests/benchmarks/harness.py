"""What the benchmarks share: taking turns, medians, bounds and their verdicts, Ray."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from polytrain import ScalingConfig

OURS = "polytrain"
RAY_TRAIN = "Ray Train"

T = TypeVar("T")

_console = Console(width=None if sys.stdout.isatty() else 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    repetitions: int
    quick: bool
    """Measure once, with little data, and no peer that needs to be installed."""

    own: argparse.Namespace = field(default_factory=argparse.Namespace)
    """Of one benchmark alone."""


def durations(*seconds: float) -> str:
    """A duration, or from where to where durations go, for example "53.5–73.2 ms"."""
    return _scaled(seconds, {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9})


def row_rates(*rows_per_second: float) -> str:
    """Rows per second."""
    return _scaled(rows_per_second, {"M/s": 1e6, "k/s": 1e3})


def event_rates(*events_per_second: float) -> str:
    """Events per second, or steps."""
    return _scaled(events_per_second, {"M/s": 1e6, "k/s": 1e3, "/s": 1.0})


def percentages(*parts: float) -> str:
    """Parts of a whole."""
    return "–".join(f"{100 * part:.2f}" for part in parts) + " %"


def sizes(*bytes_: float) -> str:
    """Sizes of memory."""
    return _scaled(bytes_, {"GB": 1e9, "MB": 1e6, "kB": 1e3})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that ours may be: a number, or a share of a peer's. Or the least."""

    factor: float
    of: str | None = None
    """The peer; None if `factor` is in the figure's own unit."""

    at_least: bool = False
    """More is better."""

    def limit(self, peers: Mapping[str, float]) -> float | None:
        """In the figure's unit; None if the peer was not measured.

        Args:
            peers: name to median.
        """
        if self.of is None:
            return self.factor
        return self.factor * peers[self.of] if self.of in peers else None

    def is_missed(self, ours: float, peers: Mapping[str, float]) -> bool:
        """Whether our median is on the wrong side."""
        limit = self.limit(peers)
        return limit is not None and (ours < limit if self.at_least else ours > limit)

    def shown(self, show: Callable[..., str]) -> str:
        """The bound in words.

        Args:
            show: writes numbers of the figure's unit.
        """
        return f"{'≥' if self.at_least else '≤'} " + (
            f"{self.factor:.2g}" if self.of else show(self.factor)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One quantity, measured with everybody."""

    what: str
    samples: Mapping[str, Sequence[float]]
    """Ours and the peers', by name."""

    bounds: Sequence[Bound] = ()
    """Of each peer at most one, and one that is of none."""

    show: Callable[..., str] = durations
    """Writes one of the samples, or two as a range."""

    @property
    def medians(self) -> dict[str, float]:
        """Name to median."""
        return {name: statistics.median(values) for name, values in self.samples.items()}

    @property
    def peers(self) -> dict[str, float]:
        """The medians without ours."""
        return {name: median for name, median in self.medians.items() if name != OURS}

    @property
    def missed(self) -> list[Bound]:
        """The bounds that ours doesn't keep."""
        return [bound for bound in self.bounds if bound.is_missed(self.medians[OURS], self.peers)]


def take_turns(
    parties: Mapping[str, Callable[[], T]], *, repetitions: int, what: str
) -> dict[str, list[T]]:
    """Measure several parties in turn, so that the machine's moods hit all alike.

    Args:
        parties: name to what measures it. Every other round takes them in reverse.
        what: is measured, for the line that tells how far it is.

    Returns:
        Name to what the party's function has returned, once for each round.
    """
    taken: dict[str, list[T]] = {name: [] for name in parties}
    order = list(parties)
    for repetition in range(repetitions):
        for name in order:
            load = f"load average {os.getloadavg()[0]:.1f}"
            progress = f"{what}: {name}, {repetition + 1} of {repetitions} ({load})"
            _console.print(progress, style="dim", highlight=False)
            taken[name].append(parties[name]())
        order.reverse()
    return taken


def parse(
    argv: Sequence[str] | None,
    *,
    description: str,
    repetitions: int,
    add_own: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Options:
    """Read the command line.

    Args:
        argv: its arguments; the process's own by default.
        repetitions: how many there are by default.
        add_own: adds the benchmark's own arguments.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repetitions", type=positive, default=repetitions, metavar="N")
    parser.add_argument(
        "--quick", action="store_true", help="once, with little data, without other trainers"
    )
    if add_own is not None:
        add_own(parser)
    parsed = parser.parse_args(argv)
    repetitions = 1 if parsed.quick else parsed.repetitions
    return Options(repetitions=repetitions, quick=parsed.quick, own=parsed)


def conclude(title: str, figures: Sequence[Figure], *, notes: Sequence[str] = ()) -> int:
    """Print the table, and return the exit code: 1 if a bound was missed.

    Args:
        notes: lines to print below the table.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "", "median", "range", "ours/its", "required"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for figure in figures:
        for name, samples in figure.samples.items():
            table.add_row(
                figure.what if name == OURS else "",
                name,
                figure.show(figure.medians[name]),
                figure.show(min(samples), max(samples)) if len(samples) > 1 else "",
                "" if name == OURS else _ratio(figure.medians[OURS], figure.medians[name]),
                _judgement(figure, name),
            )
        table.add_section()
    _console.print(table)
    for note in notes:
        _console.print(note, style="dim", highlight=False)
    return 1 if any(figure.missed for figure in figures) else 0


@contextlib.contextmanager
def running_ray(num_cpus: int) -> Iterator[None]:
    """Have Ray up before anything is measured; one that is there already is used as it is."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        from polytrain.workers.processes.cache import let_go

        # The zygote that is kept would outlive the block by a minute.
        let_go()
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        # A controller of Ray Train's may hang while its interpreter ends, and outlive all else.
        _, left = psutil.wait_procs(started, timeout=5)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def start_workers(count: int) -> None:
    """Have Ray start the processes that it keeps for its CPUs, which it does in its own time."""
    import ray

    # Tasks that last a while are given a process each.
    task = ray.remote(lambda: time.sleep(1))
    ray.get([task.remote() for _ in range(count)])


def settle(timeout_s: float = 30.0) -> None:
    """Wait until Ray has got back all that the last run held.

    Raises:
        TimeoutError: if it hasn't after that time.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    while ray.available_resources().get("CPU", 0.0) < ray.cluster_resources()["CPU"]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"The last run still holds CPUs after {timeout_s:g} s.")
        time.sleep(0.05)
    # Processes of the last run may still be ending, which nothing tells.
    time.sleep(1.0)


def require_ray_train() -> None:
    """Import the peer, which nobody's time is to include.

    Raises:
        SystemExit: if it isn't installed; it says what to do.
    """
    try:
        import ray.train.torch  # noqa: F401
    except ImportError:
        raise SystemExit(
            "Ray Train, the yardstick, can't be imported: "
            "pip install -r .ci/requirements/bench.txt (or measure ours alone, with --quick)"
        ) from None


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where the workers of ours are."""
    parser.add_argument(
        "--cluster",
        choices=("ray", "local"),
        default="ray",
        help="where the workers of ours are; ray by default",
    )


def scaling_in(cluster: Literal["ray", "local"], workers: int) -> ScalingConfig:
    """So many workers of ours. On this machine they share the cores that it has.

    Args:
        cluster: one of the choices of `add_cluster`.
        workers: how many.
    """
    if cluster == "ray":
        return ScalingConfig(num_workers=workers, cluster="ray")
    share = min(1.0, len(os.sched_getaffinity(0)) / workers)
    return ScalingConfig(num_workers=workers, cluster="local", resources_per_worker={"CPU": share})


def positive(text: str) -> int:
    """A number of the command line that is 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("give 1 or more")
    return number


def _judgement(figure: Figure, name: str) -> str:
    """The bound and whether it was kept, for the row of whom ours is bound to."""
    return ", ".join(
        f"{bound.shown(figure.show)} "
        + ("[bold red]MISSED[/]" if bound in figure.missed else "[green]ok[/]")
        for bound in figure.bounds
        if name == (bound.of or OURS)
    )


def _ratio(ours: float, its: float) -> str:
    """Ours divided by the peer's; "–" if the peer's is nothing, as a growth of memory may be."""
    return f"{ours / its:.2g}" if its else "–"


def _scaled(values: Sequence[float], units: Mapping[str, float]) -> str:
    """Numbers in the largest unit that the greatest of them reaches, whatever its sign."""
    greatest = max(map(abs, values))
    unit, factor = next(
        (item for item in units.items() if greatest >= item[1]), list(units.items())[-1]
    )
    return "–".join(f"{value / factor:.3g}" for value in values) + f" {unit}"
