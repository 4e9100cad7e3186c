"""The network tier: workers on two hosts, and a network or a host that fails.

The hosts are made of Linux namespaces, which takes root. Elsewhere the tests are skipped. A class
of these tests takes about a minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from polytrain.testing.chaos import FaultyRuns
from polytrain.testing.chaos_runner import CaseResult
from polytrain.testing.host_runs import RESET, HostCluster, HostFault
from polytrain.testing.hosts import Host, why_no_hosts

_CUT_S = 3.0


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
