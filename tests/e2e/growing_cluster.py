"""A Ray cluster with an autoscaler, whose nodes are processes of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID
from tests.listeners import free_ports

from polytrain.testing.processes import eventually, title

OPEN = {"RAY_AUTH_MODE": "disabled"}
"""A variable of the cluster and of its drivers. A Ray that ran in this process has set another."""

# Ray's wheel lacks the defaults of "fake_multinode"; those of an external provider suffice.
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


@contextmanager
def growing_cluster(
    version: int, node: Mapping[str, Any], *, max_nodes: int, head_cpus: int = 1
) -> Iterator[str]:
    """Have a cluster of one node, to which an autoscaler adds nodes of one type; yield its address.

    Args:
        version: of Ray's autoscaler, 1 or 2.
        node: `resources` and `labels` of the type.
        max_nodes: how many it may add.
        head_cpus: CPUs of the node that there is.
    """
    # The paths of sockets must be short.
    directory = Path(tempfile.mkdtemp(prefix="growing-", dir="/tmp"))
    port, port_of_clients = free_ports(2)
    address = f"{ray.util.get_node_ip_address()}:{port}"
    provider = {
        "type": "external",
        "module": _PROVIDER,
        "gcs_address": address,
        "head_node_id": FAKE_HEAD_NODE_ID,
        "launch_multiple": True,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    added = {"max_workers": max_nodes, **node}
    config = autoscaling_config(provider, head="ray.head.default", added=added)
    (directory / "config.json").write_text(json.dumps(config))
    environment = {
        **os.environ,
        **OPEN,
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    if version == 2:
        environment |= {
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }
    command = [
        *(Path(sys.executable).with_name("ray"), "start", "--head", "--block"),
        f"--port={port}",
        f"--ray-client-server-port={port_of_clients}",
        f"--temp-dir={directory / 'ray'}",
        f"--autoscaling-config={directory / 'config.json'}",
        f"--num-cpus={head_cpus}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--dashboard-agent-listen-port=0",
        "--disable-usage-stats",
    ]
    with open(directory / "output", "w") as output:
        head = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        written = (directory / "output").read_text
        assert eventually(lambda: "will now block" in written(), seconds=60), written()
        yield address
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(30)
        for process in _processes_of(directory):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(directory, ignore_errors=True)


def autoscaling_config(
    provider: Mapping[str, Any], *, head: str, added: Mapping[str, Any], idle_s: float = 60
) -> dict[str, Any]:
    """Return the configuration of an autoscaler that adds nodes of one type.

    Args:
        provider: where its nodes come from.
        head: the type of the node that there is.
        added: `resources`, `max_workers` and `labels` of the type.
        idle_s: seconds after which it removes an idle node.
    """
    commands = ("setup", "initialization", "head_setup", "worker_setup", "head_start_ray")
    return {
        "cluster_name": "growing",
        "max_workers": added["max_workers"],
        "idle_timeout_minutes": idle_s / 60,
        "provider": provider,
        "available_node_types": {
            head: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "added": {"node_config": {}, "min_workers": 0, **added},
        },
        "head_node_type": head,
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{name}_commands": [] for name in (*commands, "worker_start_ray")},
    }


def _processes_of(directory: Path) -> list[psutil.Process]:
    """Return what is left: the added nodes, whose raylets outlive the autoscaler that died."""
    return [each for each in psutil.process_iter() if str(directory) in title(each)]
