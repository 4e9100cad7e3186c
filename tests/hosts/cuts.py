"""Runs on hosts of which one after another is cut off, and what is wrong with them in the end.

A host that is cut off loses its network and nothing else: what runs there goes on as far as it can,
and still writes to the shared directory. So it could do what nobody may do twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

from tests.hosts.connections import words

from polytrain import Result
from polytrain.checkpoint.manifest import MANIFEST_NAME, parse_manifest
from polytrain.testing.hosts import Host, hosts, join_ray, ray_on
from polytrain.testing.hosts.testbed import leave_ray
from polytrain.testing.processes import eventually
from polytrain.testing.rows import steps_that_count

Hit = Literal["rank 0", "rank 1", "standby", "driver"]
"""What is on the host that is cut off."""

_DRIVER = Path(__file__).with_name("cuts_driver.py")
_BOUND_S = 300.0
"""Seconds within which a run goes on: Ray may take a minute, and a machine is busy."""

_KNOWN_S = 6.0
"""Seconds after which a silent loss is known."""

_DRIVERS = 6
"""The most drivers of a run."""

_PAUSE_S = 0.2
_OURS = ("polytrain.workers", "ray::RayHost")
"""Titles of a run's processes on a host."""

_WATCH = """
import json, ray, sys
ray.init(log_to_driver=False)
for line in sys.stdin:
    alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    print(json.dumps([alive, ray.available_resources().get("CPU", 0)]), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A host that is cut off."""

    hit: Hit
    after_s: float
    """Seconds of training before it."""

    with_standby: bool
    """Whether it waits for the standby: without one, the run waits for the host."""

    healed_after_s: float | None
    """None: not before the run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run, and what happens to its hosts."""

    backend: str
    driver_has_rank: bool
    """Whether the first worker is on the host of the driver, which then isn't that of Ray's head.
    Otherwise the driver is on the host of the head, which has no workers."""

    cuts: tuple[Cut, ...]


def planned(seed: int, *, cuts: int, backends: Sequence[str]) -> Plan:
    """A random plan; the same seed gives the same one."""
    random = Random(seed)
    # One run in four has its driver on a host that may be cut off.
    driver_has_rank = seed % 4 == 3
    kinds: list[Hit] = ["rank 0", "rank 1", "standby"]
    weights = [4, 4, 1]
    if driver_has_rank:
        kinds, weights = ["driver", "rank 1"], [1, 1]
    chosen = random.choices(kinds, weights, k=cuts)
    drawn = [_random_cut(hit, random, is_last=at == cuts) for at, hit in enumerate(chosen, 1)]
    backend = backends[seed % len(backends)]
    return Plan(backend=backend, driver_has_rank=driver_has_rank, cuts=tuple(drawn))


def _random_cut(hit: Hit, random: Random, *, is_last: bool) -> Cut:
    # Evenly on a logarithmic scale: as many of less than 5 s, which are no failures, as of more.
    # Ray gives a host up after a minute, and starting it there again takes long: once in a run.
    seconds = 0.5 * (180 if is_last else 90) ** random.random()
    return Cut(
        hit=hit,
        after_s=random.uniform(0, 6),
        with_standby=random.random() < 0.8,
        healed_after_s=None if is_last and random.random() < 0.5 else seconds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A cut that has happened."""

    cut: Cut
    at: float
    """In seconds since the epoch."""

    healed_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The seconds of a recovery, part by part: they add up to the time to the first new step."""

    detection: float
    """From the cut until the driver knows."""

    kill: float
    """Until all worker processes of the attempt that can be reached are gone."""

    relaunch: float
    """Until each rank has a place, its data and its starting point."""

    join: float
    """Until the last rank has joined."""

    step: float
    """Until the first report."""

    @property
    def total(self) -> float:
        return self.detection + self.kill + self.relaunch + self.join + self.step


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a run."""

    plan: Plan
    struck: list[Struck] = field(default_factory=list)
    parts: list[Parts | None] = field(default_factory=list)
    """Of each cut; None if it was no failure."""

    restarts: int = 0
    drivers: int = 1
    steps: int = 0
    wrong: list[str] = field(default_factory=list)


class Cluster:
    """Hosts with Ray, which runs share. A host whose Ray has given up gets a new one."""

    def __init__(self, all_hosts: Sequence[Host]) -> None:
        self.hosts = {host.address: host for host in all_hosts}
        self.head, *self.others = all_hosts
        # The head has no room for workers, as usual.
        self.address = ray_on(self.head, cpus=0)
        self._join(self.others)
        self._watch = self.head.start(
            [sys.executable, "-c", _WATCH],
            env={"RAY_ADDRESS": self.address},
            input=subprocess.PIPE,
            output=subprocess.PIPE,
        )

    def look(self) -> tuple[list[str], float]:
        """The addresses of the nodes that Ray takes for alive, and the free CPUs."""
        assert self._watch.stdin is not None
        self._watch.stdin.write("look\n")
        self._watch.stdin.flush()
        while not (line := words(self._watch).readline()).startswith("["):
            assert line, "the process that watches Ray has ended"
        alive, free = json.loads(line)
        return alive, free

    def renew(self, cut_off: Collection[Host] = ()) -> None:
        """Start Ray again where its node is dead, as whoever runs the cluster does."""
        alive, _ = self.look()
        dead = [host for host in self.others if host.address not in alive and host not in cut_off]
        for host in dead:
            leave_ray(host)
        self._join(dead)

    def _join(self, joining: Sequence[Host]) -> None:
        for host in joining:
            join_ray(self.address, host, cpus=1)

    def close(self) -> None:
        self._watch.kill()
        self._watch.communicate()


@contextmanager
def cluster(shared: Path) -> Iterator[Cluster]:
    """Four hosts, of which three have room for one worker each."""
    with hosts(4, shared=shared) as four:
        found = Cluster(four)
        try:
            yield found
        finally:
            found.close()


class Journal:
    """The lines of a run's journal, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._path = path
        self._read = 0

    def update(self) -> list[dict[str, Any]]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self.lines += map(json.loads, whole.splitlines())
        return self.lines

    def of(self, *events: str, since: float = 0.0) -> list[dict[str, Any]]:
        return [each for each in self.update() if each["event"] in events and each["time"] > since]


class Stuck(Exception):
    """A run doesn't go on. Its hosts can't be used for another."""


class Running:
    """A run, from the first of its drivers to the last. Its `with` block ends with the verdict."""

    def __init__(self, cluster: Cluster, plan: Plan, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._cluster = cluster
        self._directory = directory
        self.journal = Journal(directory / "run" / "journal.jsonl")
        self.outcome = Outcome(plan=plan)
        self._config = {
            "backend": plan.backend,
            "directory": str(directory),
            "steps": 0,
            "pause_s": _PAUSE_S,
            "cluster": "ray",
        }
        self._cut_off: list[Host] = []
        self.drive(cluster.others[0] if plan.driver_has_rank else cluster.head)

    def __enter__(self) -> Running:
        self.goes_on(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.end()
        finally:
            self.heal()
            self._driver.kill()
            self._driver.wait()
        if kind is None:
            lines = self.journal.update()
            self.outcome.wrong += _wrong(self.outcome, self._directory, lines)
            self.outcome.wrong += _left_on(self._cluster)

    def windows(self, times: Sequence[float]) -> Iterator[list[dict[str, Any]]]:
        """The journal's lines from each of some times to the next."""
        for at, end in pairwise([*times, time.time()]):
            yield [line for line in self.journal.lines if at <= line["time"] < end]

    def drive(self, host: Host) -> None:
        self.driver_host = host
        # With one host less there is no room for a standby.
        self._config["standby"] = 0 if self._cut_off else 1
        with (self._directory / "driver.txt").open("a") as printed:
            self._driver = host.start(
                [sys.executable, str(_DRIVER), json.dumps(self._config)],
                env={"RAY_ADDRESS": self._cluster.address, "POLYTRAIN_COLOR": "0"},
                output=printed.fileno(),
            )

    def goes_on(self, since: float) -> None:
        """Wait until a step is committed, if need be with another driver."""
        deadline = time.monotonic() + _BOUND_S

        def has_news() -> bool:
            committed = self.journal.of("Committed", since=since)
            return bool(committed) or self._driver.poll() is not None

        while not self.journal.of("Committed", since=since):
            eventually(has_news, deadline - time.monotonic())
            if self._driver.poll() is not None:
                self._drive_again()
            if time.monotonic() > deadline:
                raise Stuck(f"no new step; the driver printed\n{self.printed}")

    def _drive_again(self) -> None:
        """Start the command again, as docs/failures.md says, where the driver's host was lost."""
        self.outcome.drivers += 1
        if self.outcome.drivers > _DRIVERS:
            raise Stuck(f"the driver ends again and again; it printed\n{self.printed}")
        self._cluster.renew(self._cut_off)
        alive = [host for host in self._cluster.others if host not in self._cut_off]
        self.drive(alive[0] if self.outcome.plan.driver_has_rank else self._cluster.head)

    def suffer(
        self, hit: Hit, act: Callable[[Host], object], undo: Callable[[Host], object]
    ) -> float:
        """Let something happen to a host, undo it once the run goes on, and return when it came.

        Args:
            hit: what is on the host.
            act: it happens, and lasts until this returns, or longer.
            undo: ends it.
        """
        self._await_standby()
        time.sleep(1)
        host = self._host_of(hit)
        at = time.time()
        act(host)
        # What is lost silently is known by then.
        self.goes_on(time.time() + _KNOWN_S)
        undo(host)
        self.goes_on(time.time())
        return at

    def _await_standby(self) -> None:
        """Wait until the standby's process is there: it begins to start when it has its room."""
        hosts = self._cluster.others

        def is_there() -> bool:
            # Ray may learn of a node's death only now.
            self._cluster.renew()
            return all(any("RayHost" in p for p in _processes_on(host)) for host in hosts)

        if not eventually(is_there, 120):
            raise Stuck("the standby hasn't started within 120 s")

    def strike(self, cut: Cut) -> None:
        if cut.with_standby:
            self._await_standby()
        else:
            self._cluster.renew()
        time.sleep(cut.after_s)
        host = self._host_of(cut.hit)
        at = time.time()
        host.cut_off()
        self._cut_off = [host]
        if cut.healed_after_s is None:
            self.outcome.struck.append(Struck(cut=cut, at=at))
            self.goes_on(at + _KNOWN_S)
            return
        time.sleep(cut.healed_after_s)
        healed_at = time.time()
        self.heal()
        self.outcome.struck.append(Struck(cut=cut, at=at, healed_at=healed_at))
        self.goes_on(healed_at)

    def heal(self) -> None:
        for host in self._cut_off:
            host.heal()
        self._cut_off = []

    def _host_of(self, hit: Hit) -> Host:
        if hit == "driver":
            return self.driver_host
        launched = self.journal.of("Launched")[-1]["hosts"]
        if hit != "standby":
            return self._cluster.hosts[launched[int(hit[-1]) % len(launched)]]
        idle = [host for host in self._cluster.others if host.address not in launched]
        return idle[0] if idle else self._cluster.hosts[launched[-1]]

    def end(self) -> None:
        """Let the run end after its next step, with what is cut off still cut off."""
        (self._directory / "end").touch()
        while not self._has_finished():
            self._drive_again()
        self.heal()

    def _has_finished(self) -> bool:
        try:
            return self._driver.wait(_BOUND_S) == 0
        except subprocess.TimeoutExpired:
            raise Stuck(f"the run doesn't end; the driver printed\n{self.printed}") from None

    @property
    def printed(self) -> str:
        return (self._directory / "driver.txt").read_text()[-6000:]


def run(cluster: Cluster, plan: Plan, directory: Path) -> Outcome:
    """Run a plan, and judge what is left of it.

    Args:
        cluster: the hosts.
        plan: what happens.
        directory: the run's own, below the directory that the hosts share.
    """
    running = Running(cluster, plan, directory)
    outcome = running.outcome
    try:
        with running:
            for cut in plan.cuts:
                running.strike(cut)
    except Stuck as error:
        outcome.wrong.append(str(error))
        return outcome
    windows = running.windows([each.at for each in outcome.struck])
    outcome.parts = [
        parts_of(lines, each.at) for each, lines in zip(outcome.struck, windows, strict=True)
    ]
    return outcome


def parts_of(lines: Sequence[Mapping[str, Any]], at: float) -> Parts | None:
    """The parts of the first recovery in some lines of a journal; None if there is none.

    Args:
        lines: in their order.
        at: when the fault came, in seconds since the epoch.
    """
    ended = next((at for at, each in enumerate(lines) if each.get("failure")), None)
    if ended is None:
        return None
    attempt = lines[ended]["attempt"]
    first = next((each["time"] for each in lines if each["event"] == "AgentLost"), None)
    if first is None or first > lines[ended]["time"]:
        # A peer's broken connection, or another driver, has ended the attempt.
        first = lines[ended]["time"]
    after = [each for each in lines[ended:] if each.get("attempt", attempt) > attempt]
    started = _time_of(after, "Started")
    # Another failure may have come in between.
    newest = max((each["attempt"] for each in after), default=attempt)
    joined = [
        each["time"] for each in after if each["event"] == "Joined" and each["attempt"] == newest
    ]
    stepped = [
        each["time"]
        for each in lines[ended:]
        if each["event"] in ("Reported", "Reports") and joined and each["time"] >= joined[-1]
    ]
    if started is None or not joined or not stepped:
        return None
    return Parts(
        detection=first - at,
        kill=lines[ended]["time"] - first,
        relaunch=started - lines[ended]["time"],
        join=joined[-1] - started,
        step=stepped[0] - joined[-1],
    )


def _time_of(lines: Sequence[Mapping[str, Any]], event: str) -> float | None:
    return next((each["time"] for each in reversed(lines) if each["event"] == event), None)


def _wrong(outcome: Outcome, directory: Path, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    run = directory / "run"
    result = Result.from_path(run)
    outcome.restarts = result.restarts
    history = list(result.history)
    outcome.steps = len(history)
    if not result.finished:
        yield "the run hasn't finished"
    if [each["step"] for each in history] != list(range(1, len(history) + 1)):
        yield f"the history has the steps {[each['step'] for each in history]}"
        return
    undisturbed = directory / "undisturbed"
    expected = _undisturbed(outcome.plan.backend, len(history), undisturbed)
    differing = [
        ours["step"] for ours, theirs in zip(history, expected, strict=True) if ours != theirs
    ]
    if differing:
        yield f"from step {differing[0]} on the model isn't that of an undisturbed run"
    ours, theirs = steps_that_count(directory / "diary"), steps_that_count(undisturbed / "diary")
    for step, rows in theirs.items():
        if sorted(ours.get(step, ())) != sorted(rows):
            yield f"step {step} has other rows: {len(ours.get(step, ()))} of {len(rows)}"
    commits = Counter(each["step"] for each in lines if each["event"] == "Committed")
    yield from (f"step {step} was committed {n} times" for step, n in commits.items() if n > 1)
    manifests = list((run / "checkpoints").glob(f"*/{MANIFEST_NAME}"))
    stored = Counter(parse_manifest(each.read_bytes()).step for each in manifests)
    yield from (f"step {step} has {n} checkpoints" for step, n in stored.items() if n > 1)
    if {*stored} != {*commits}:
        yield f"committed or stored only: {sorted({*stored} ^ {*commits})}"
    for each in (run / "checkpoints").iterdir():
        if each / MANIFEST_NAME not in manifests:
            yield f"{each} has no manifest"


def _undisturbed(backend: str, steps: int, directory: Path) -> Sequence[Mapping[str, Any]]:
    """The history of a run without faults, on this machine."""
    directory.mkdir()
    config = {"backend": backend, "directory": str(directory), "steps": steps}
    config |= {"pause_s": 0, "standby": 0, "cluster": "local"}
    command = [sys.executable, str(_DRIVER), json.dumps(config)]
    subprocess.run(command, check=True, capture_output=True)
    return list(Result.from_path(directory / "run").history)


def _left_on(cluster: Cluster) -> list[str]:
    """Processes of the run on any host, and what it has reserved."""
    # Ray, which was cut off, may take a minute to end them.
    eventually(lambda: not any(map(_processes_on, cluster.hosts.values())), 120)
    left = [
        f"left on {host}: {found}"
        for host in cluster.hosts.values()
        if (found := _processes_on(host))
    ]
    cluster.renew()
    eventually(lambda: cluster.look()[1] == len(cluster.others), 60)
    _, free = cluster.look()
    if free != len(cluster.others):
        left.append(f"{free} of {len(cluster.others)} CPUs are free")
    return left


def _processes_on(host: Host) -> list[str]:
    lines = host.run("ps -ww ax -o args").stdout.splitlines()
    return [line for line in lines if any(title in line for title in _OURS)]
