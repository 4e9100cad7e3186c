"""The network tier: workers on two hosts, and a network or a host that fails.

The hosts are made of Linux namespaces, which takes root. Elsewhere the tests are skipped. A class
of these tests takes about a minute.

A fault of a host comes at a known time: a rank of the run holds still at a given step, the test
does something to a host, and lets the rank continue.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from polytrain.testing.chaos import FaultyRuns
from polytrain.testing.chaos_cases import Case
from polytrain.testing.chaos_runner import (
    CaseResult,
    ChaosRun,
    Files,
    Subject,
    Work,
    judged,
    read_job,
    write_job,
)
from polytrain.testing.faults import Fault
from polytrain.testing.hosts import Host, hosts, ray_on, why_no_hosts
from polytrain.testing.processes import eventually, mark_processes

_CUT_S = 3.0

BOUND_S = 240.0
"""Seconds within which a run must end: Ray may take a minute to see that a node is lost."""

_EXPECTED = "expected"
_OUTCOME = "outcome.json"
_PRINTED = "driver.txt"

_WORKERS = "[p]olytrain.workers"
_HELD = Fault(rank=1, at_step=3, kind="held")

_SOON = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray notices that a host is lost in seconds, and not in one, on a machine busy with tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFault:
    """Something that happens to a host while a rank of a run holds still."""

    strike: Callable[[Host], None]
    restarts: tuple[int, ...]
    """Allowed numbers of restarts of the run."""


RESET = HostFault(strike=Host.reset_connections, restarts=(0, 1, 2))
"""The ranks' connections, and Ray's: these it may notice later, in the attempt after."""


@dataclass(kw_only=True)
class HostCluster:
    """Two hosts with Ray, which runs share until a host is lost: then there are new ones."""

    shared: Path
    """The directory of all runs."""

    env: Mapping[str, str] = field(default_factory=lambda: _SOON)
    """Variables of Ray's processes."""

    _stack: ExitStack = field(default_factory=ExitStack)
    _hosts: tuple[Host, ...] = ()
    _address: str = ""
    _runs: int = 0

    def wrong_with(
        self, fault: HostFault, subject: Subject, *, work: Work = "model", expected: Files | None
    ) -> list[str]:
        """What is wrong with a run that has a worker on each host, one of which has a fault.

        Args:
            fault: of the host that the driver isn't on.
            subject: what is trained.
            work: what the run does.
            expected: the model of a run without faults; None if any model is right.
        """
        self._renew()
        self._runs += 1
        case = Case(
            name="host",
            faults=(_HELD,),
            effect="restart" if any(fault.restarts) else "none",
            restarts=fault.restarts,
            max_failures=2,
            on_two_nodes=True,
            cluster="ray",
        )
        directory = self.shared / f"run-{self._runs}"
        run = ChaosRun(subject=subject, case=case, work=work, directory=directory)
        with _running(run, self._hosts, self._address, expected=expected) as on_hosts:
            on_hosts.wait_until_held()
            fault.strike(self._hosts[1])
            on_hosts.go_on()
            return on_hosts.wrong_in_the_end()

    def _renew(self) -> None:
        if not self._hosts or not all(host.is_alive for host in self._hosts):
            self.close()
            self._hosts = self._stack.enter_context(hosts(2, shared=self.shared))
            self._address = ray_on(*self._hosts, cpus=2, env=self.env)

    def close(self) -> None:
        """End the hosts."""
        self._hosts = ()
        self._stack.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostRun:
    """A run whose driver is a process of a host."""

    run: ChaosRun
    hosts: Sequence[Host]
    driver: subprocess.Popen[str]

    def wait_until_held(self) -> None:
        """Wait until the rank holds still.

        Raises:
            AssertionError: the run ended, the rank didn't get there, or a host has no rank.
        """
        eventually(
            lambda: self.run.plan.injected or self.driver.poll() is not None, seconds=BOUND_S
        )
        assert self.driver.poll() is None, f"the driver ended early\n{self._printed}"
        # The fault is recorded before it happens.
        held = eventually(lambda: any(_finds(host, "stat", "^T") for host in self.hosts))
        assert held, f"no rank holds still at step {_HELD.at_step}\n{self._printed}"
        assert all(_finds(host, "args", _WORKERS) for host in self.hosts), "a host has no rank"

    def go_on(self) -> None:
        """Let the rank continue, on whichever host it is."""
        for host in self.hosts:
            if host.is_alive:
                # All processes of the host.
                host.run("kill -CONT -1")

    def wrong_in_the_end(self) -> list[str]:
        """Wait for the end, and return what is wrong with the run."""
        self.driver.wait(timeout=BOUND_S)
        written = self.run.directory / _OUTCOME
        assert written.exists(), f"the driver failed\n{self._printed}"
        wrong: list[str] = json.loads(written.read_text())
        return wrong + _left_on(self.hosts)

    @property
    def _printed(self) -> str:
        return (self.run.directory / _PRINTED).read_text()


@contextmanager
def _running(
    run: ChaosRun, hosts: Sequence[Host], address: str, *, expected: Files | None
) -> Iterator[_HostRun]:
    """Start a run whose driver is on the first of some hosts.

    Args:
        run: the run. Its directory is shared by the hosts.
        hosts: all hosts of the Ray cluster.
        address: of the cluster.
        expected: the model of a run without faults; None if any model is right.
    """
    run.directory.mkdir(parents=True)
    write_job(run)
    (run.directory / _EXPECTED).write_bytes(pickle.dumps(expected))
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from {__name__} import drive\ndrive({str(run.directory)!r})"
    )
    with (run.directory / _PRINTED).open("w") as printed:
        driver = hosts[0].start(
            [sys.executable, "-c", code], env={"RAY_ADDRESS": address}, output=printed.fileno()
        )
    try:
        yield _HostRun(run=run, hosts=hosts, driver=driver)
    finally:
        driver.kill()
        driver.wait()


def drive(directory: str) -> None:
    """The main function of the driver: run and judge what was written."""
    import ray

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
    mark_processes()
    run = read_job(directory)
    expected = pickle.loads((run.directory / _EXPECTED).read_bytes())
    outcome = judged(run, expected=expected, bound_s=BOUND_S)
    (run.directory / _OUTCOME).write_text(json.dumps(outcome.wrong))


def _left_on(hosts: Sequence[Host]) -> list[str]:
    """Worker processes and zygotes on hosts that live, once the driver is gone."""
    alive = [host for host in hosts if host.is_alive]
    eventually(lambda: not any(_finds(host, "args", _WORKERS) for host in alive))
    found = [(host, _finds(host, "args", _WORKERS)) for host in alive]
    return [f"left on {host}: {processes}" for host, processes in found if processes]


def _finds(host: Host, column: str, pattern: str) -> str:
    """The processes of a host, as `ps` shows them, that match a pattern in a column."""
    return host.run(f"ps -ww -eo {column} | grep -- '{pattern}' || true").stdout


class NetworkTier(FaultyRuns):
    """Tests of runs on two hosts. Inherit, and set `backend`."""

    @pytest.fixture(scope="class")
    @classmethod
    def two_hosts(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
        """Two hosts with Ray."""
        reason = why_no_hosts()
        if reason is not None:
            pytest.skip(reason)
        cluster = HostCluster(shared=tmp_path_factory.mktemp("hosts"))
        yield cluster
        cluster.close()

    def test_network_is_cut(self, two_hosts: HostCluster, untouched: CaseResult) -> None:
        """Packets of a host vanish for three seconds: the run waits, and doesn't restart.

        If this fails: the framework gives a connection up within seconds. Set a longer timeout.
        """
        fault = HostFault(strike=cut, restarts=(0,))
        assert two_hosts.wrong_with(fault, self.subject(), expected=untouched.model) == []

    def test_connections_are_reset(self, two_hosts: HostCluster, untouched: CaseResult) -> None:
        """All connections between the hosts are reset: the model is the same.

        If this fails: a rank waits for a peer whose connection is gone, or the framework lets a
        collective operation return wrong numbers.
        """
        assert two_hosts.wrong_with(RESET, self.subject(), expected=untouched.model) == []

    def test_a_host_is_lost(self, two_hosts: HostCluster, untouched: CaseResult) -> None:
        """A host is killed: all workers continue on the other one, and the model is the same.

        If this fails: the engine offers an address that only its own host reaches, or blocks in a
        collective operation so that it can't be ended.
        """
        fault = HostFault(strike=Host.kill, restarts=(1,))
        assert two_hosts.wrong_with(fault, self.subject(), expected=untouched.model) == []


def cut(host: Host) -> None:
    """Cut a host off, for so long that TCP sends everything again."""
    host.cut_off()
    time.sleep(_CUT_S)
    host.heal()
