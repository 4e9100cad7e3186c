"""On which nodes ranks and standbys are, also by labels; which devices and storage they see."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.sweeps import only_in_sweep

SCRIPT = """
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import polytrain
import polytrain_plugins
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

DEVICES = ("TPU_VISIBLE_CHIPS", "NEURON_RT_VISIBLE_CORES", "HABANA_VISIBLE_MODULES")

def node(tier, cpus, **resources):
    return {
        "num_cpus": cpus, "labels": {"tier": tier}, "env_vars": {"NODE_TIER": tier},
        "resources": resources, "include_log_monitor": False,
    }

head = {"include_dashboard": False, **node("head", 2)}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(**node("small", 2))
cluster.add_node(**node("large", 3, TPU=8, neuron_cores=2, HPU=2))
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=40)

def place():
    context = polytrain.get_context()
    return {
        "size": context.get_world_size(), "node": context.get_node_rank(),
        "local": context.get_local_rank(), "local_size": context.get_local_world_size(),
        "tier": where(),
    }

def where():
    return os.environ["NODE_TIER"]

def devices():
    # The first attempt fails: the second is in other processes.
    if polytrain.get_context().get_world_rank() == 0 and not os.path.exists("failed-once"):
        open("failed-once", "w").close()
        raise RuntimeError("once")
    return {name: os.environ.get(name) for name in DEVICES}

class WaitForStandby:
    @polytrain_plugins.hookimpl
    def polytrain_reported(self):
        while ray.available_resources().get("CPU", 0) > 0:
            time.sleep(0.01)
        open("standby is there", "w").close()

def wait_for_standby():
    polytrain.report({})
    while not os.path.exists("standby is there"):
        time.sleep(0.01)
    return where()

def fit(case, function, backend="reference", observers=(), **scaling):
    try:
        result = make_trainer(
            backend, function, scaling_config=ScalingConfig(**scaling),
            run_config=RunConfig(
                storage_path="runs", progress=False, observers=observers,
                failure_config=FailureConfig(max_failures=1, retry_user_errors=True),
            ),
        ).fit()
        found = result.return_values
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if os.path.exists("failed-once"):
        os.remove("failed-once")
    print("CASE " + json.dumps([case, found]), flush=True)

fit("places", place, num_workers=7)
here = ray.get_runtime_context().get_node_id()
labels = next(node["Labels"] for node in ray.nodes() if node["NodeID"] == here)
print("CASE " + json.dumps(["driver", labels["tier"]]), flush=True)

# There is room for the workers on one node, and for the standby beside the driver.
tiers = [{"tier": "head"}, {"tier": "large"}]
taken = ray.util.placement_group([{"CPU": 1}, {"CPU": 3}], bundle_label_selector=tiers)
ray.get(taken.ready())
beside = {"num_workers": 2, "standby": 1, "placement_strategy": "STRICT_PACK"}
fit("beside", wait_for_standby, "torch", (WaitForStandby(),), **beside)
ray.util.remove_placement_group(taken)

if "sweep" in sys.argv:
    fit("fixed", where, num_workers=2, label_selector={"tier": "large"})
    fit("elastic", where, num_workers=(1, 2), label_selector={"tier": "small"})
fit("not", where, num_workers=2, label_selector={"tier": "!in(head,large)"})
fit("list", where, num_workers=2, label_selector=[{"tier": "small"}, {"tier": "large"}])
fit("standby", where, num_workers=2, standby=1, label_selector={"tier": "large"})
spread = {"num_workers": (2, 3), "placement_strategy": "SPREAD"}
fit("spread", where, **spread, label_selector={"tier": "large"})
fit("none", where, label_selector={"tier": "huge"})
fit("few", where, num_workers=3, label_selector={"tier": "small"})
fit("syntax", where, label_selector={"tier": "!!small"})
every_device = {"TPU": 4, "neuron_cores": 1, "HPU": 1}
fit("devices", devices, num_workers=2, resources_per_worker=every_device)
fit("TPU 3", devices, resources_per_worker={"TPU": 3})

# Nodes that have another directory under the same name, as other hosts may.
ray_command = f"{Path(sys.executable).parent}/ray"
others = {
    tier: subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh", "-c",
         f"{mount} && exec {ray_command} start --address={cluster.address} --num-cpus=1 "
         "--include-log-monitor=false "
         f"--labels=tier={tier} --block"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    for tier, mount in json.loads(sys.argv[1]).items()
}
while ray.cluster_resources()["CPU"] < 7 + len(others):
    time.sleep(0.1)
for tier in others:
    fit(tier, lambda: print("TRAINED"), num_workers=1, label_selector={"tier": tier})
ray.shutdown()
for other in others.values():
    # Without its cluster it would wait for a minute.
    other.terminate()
    other.wait()
cluster.shutdown()
"""


# In `make test`, `test_storage_check` has a directory that can't be written without a cluster.
MOUNTS = {"another": "mount -t tmpfs tmpfs runs"}
MOUNTS_IN_SWEEP = {"read-only": "mount --bind runs runs && mount -o remount,bind,ro runs"}


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """What the workers of each case returned, or the error."""
    directory = tmp_path_factory.mktemp("labels")
    (directory / "script.py").write_text(SCRIPT)
    which = [json.dumps(MOUNTS)]
    if request.config.getoption("--sweep"):
        which = [json.dumps(MOUNTS | MOUNTS_IN_SWEEP), "sweep"]
    run = subprocess.run(
        [sys.executable, "script.py", *which],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [line.removeprefix("CASE ") for line in run.stdout.splitlines() if "CASE" in line]
    assert run.returncode == 0, run.stdout + run.stderr
    return {
        **dict(json.loads(line) for line in lines),
        "runs": directory / "runs",
        "printed": run.stdout,
    }


def test_ranks_on_three_nodes(found: dict[str, Any]) -> None:
    places = found["places"]
    assert [place["size"] for place in places] == [7] * 7
    names = [place["tier"] for place in places]
    # Ranks of one node are neighbours, numbered from 0 there.
    order = list(dict.fromkeys(names))
    assert names == sorted(names, key=order.index)
    assert {name: names.count(name) for name in order} == {"head": 2, "small": 2, "large": 3}
    for rank, place in enumerate(places):
        assert place["local"] == names[:rank].count(place["tier"])
        assert place["local_size"] == names.count(place["tier"])
        assert place["node"] == order.index(place["tier"])
    # The driver's node comes first: rank 0, whose metrics are shown, is next to the user.
    assert order[0] == found["driver"]


def test_a_standby_beside_the_driver_whose_workers_are_elsewhere(found: dict[str, Any]) -> None:
    assert (found["driver"], found["beside"]) == ("head", ["small", "small"])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("case", "tiers"),
    [
        only_in_sweep("fixed", ["large", "large"]),
        ("not", ["small", "small"]),
        ("list", ["large", "small"]),
        ("standby", ["large", "large"]),
    ],
)
def test_workers_are_on_nodes_with_the_labels(
    found: dict[str, Any], case: str, tiers: list[str]
) -> None:
    assert sorted(found[case]) == tiers


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "tier"), [only_in_sweep("elastic", "small"), ("spread", "large")])
def test_workers_of_elastic_runs_are_on_nodes_with_the_labels(
    found: dict[str, Any], case: str, tier: str
) -> None:
    assert set(found[case]) == {tier}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("none", "no node of the cluster has labels that meet {'tier': 'huge'}. They have: "),
        ("none", "{'tier': 'small'}"),
        ("few", "3 workers need nodes with labels that meet {'tier': 'small'}, and those can hold"),
        ("syntax", "ScalingConfig.label_selector: Ray refuses it: Invalid label selector value"),
        ("TPU 3", "ScalingConfig.resources_per_worker: Ray refuses it: The number of requested"),
    ],
)
def test_what_no_node_offers_is_reported_at_once(
    found: dict[str, Any], case: str, said: str
) -> None:
    assert found[case].startswith("InvalidJobError: 1 problem")
    assert said in found[case]


def test_each_worker_sees_the_devices_that_ray_assigned_also_after_a_restart(
    found: dict[str, Any],
) -> None:
    chips = [set(each["TPU_VISIBLE_CHIPS"].split(",")) for each in found["devices"]]
    assert [len(each) for each in chips] == [4, 4]
    assert set.union(*chips) == set("01234567")
    for name in ("NEURON_RT_VISIBLE_CORES", "HABANA_VISIBLE_MODULES"):
        assert sorted(each[name] for each in found["devices"]) == ["0", "1"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("case", "refused", "remedy"),
    [
        (
            "another",
            "doesn't see the run's directory {runs}",
            "Set RunConfig.storage_path to a directory that all nodes mount",
        ),
        only_in_sweep(
            "read-only",
            "can't write to {runs}",
            "(Read-only file system). Mount it there so that this user can write",
        ),
    ],
)
def test_a_storage_that_a_node_can_not_use_is_reported_before_training(
    found: dict[str, Any], case: str, refused: str, remedy: str
) -> None:
    assert found[case].startswith("TrainingFailedError: ")
    assert refused.format(runs=found["runs"]) in found[case]
    assert remedy in found[case]
    assert "TRAINED" not in found["printed"]
    assert not list(found["runs"].parent.rglob(".polytrain-trial-*"))
