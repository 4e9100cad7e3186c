"""Several hosts on one machine, made of Linux namespaces, and what can happen to them.

    from polytrain.testing.hosts import hosts

    with hosts(3, shared=tmp_path) as (a, b, c):
        b.cut_off()

Tests skip with `why_no_hosts()` where that isn't possible: it takes Linux and root.
"""

from __future__ import annotations

from polytrain.testing.hosts.host import Host
from polytrain.testing.hosts.namespaces import HostsUnavailable, why_no_hosts
from polytrain.testing.hosts.testbed import hosts, join_ray, ray_on

__all__ = ["Host", "HostsUnavailable", "hosts", "join_ray", "ray_on", "why_no_hosts"]
