"""Which nodes workers are on, by their labels; and which devices they see there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json
import os

import ray
from ray.cluster_utils import Cluster

import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

DEVICES = ("TPU_VISIBLE_CHIPS", "NEURON_RT_VISIBLE_CORES", "HABANA_VISIBLE_MODULES")

def node(tier, cpus, **resources):
    return {
        "num_cpus": cpus, "labels": {"tier": tier}, "env_vars": {"NODE_TIER": tier},
        "resources": resources,
    }

head = {"include_dashboard": False, **node("head", 2)}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(**node("small", 2))
cluster.add_node(**node("large", 3, TPU=8, neuron_cores=2, HPU=2))
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=40)

def where():
    return os.environ["NODE_TIER"]

def devices():
    # The first attempt fails: the second is in other processes.
    if polytrain.get_context().get_world_rank() == 0 and not os.path.exists("failed-once"):
        open("failed-once", "w").close()
        raise RuntimeError("once")
    return {name: os.environ.get(name) for name in DEVICES}

def fit(case, function, **scaling):
    try:
        result = make_trainer(
            "reference", function, scaling_config=ScalingConfig(**scaling),
            run_config=RunConfig(
                storage_path="runs", progress=False,
                failure_config=FailureConfig(max_failures=1, retry_user_errors=True),
            ),
        ).fit()
        found = result.return_values
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if os.path.exists("failed-once"):
        os.remove("failed-once")
    print("CASE " + json.dumps([case, found]), flush=True)

fit("fixed", where, num_workers=2, label_selector={"tier": "large"})
fit("not", where, num_workers=2, label_selector={"tier": "!in(head,large)"})
fit("list", where, num_workers=2, label_selector=[{"tier": "small"}, {"tier": "large"}])
fit("elastic", where, num_workers=(1, 2), label_selector={"tier": "small"})
fit("standby", where, num_workers=2, standby=1, label_selector={"tier": "large"})
spread = {"num_workers": (2, 3), "placement_strategy": "SPREAD"}
fit("spread", where, **spread, label_selector={"tier": "large"})
fit("none", where, label_selector={"tier": "huge"})
fit("few", where, num_workers=3, label_selector={"tier": "small"})
fit("syntax", where, label_selector={"tier": "!!small"})
fit("TPU", devices, num_workers=2, resources_per_worker={"TPU": 4})
fit("others", devices, num_workers=2, resources_per_worker={"neuron_cores": 1, "HPU": 1})
fit("TPU 3", devices, resources_per_worker={"TPU": 3})
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the workers of each case returned, or the error."""
    directory = tmp_path_factory.mktemp("labels")
    (directory / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "script.py"], cwd=directory, capture_output=True, text=True, timeout=280
    )
    lines = [line.removeprefix("CASE ") for line in run.stdout.splitlines() if "CASE" in line]
    assert run.returncode == 0, run.stdout + run.stderr
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize(
    ("case", "tiers"),
    [
        ("fixed", ["large", "large"]),
        ("not", ["small", "small"]),
        ("list", ["large", "small"]),
        ("standby", ["large", "large"]),
    ],
)
def test_workers_are_on_nodes_with_the_labels(
    found: dict[str, Any], case: str, tiers: list[str]
) -> None:
    assert sorted(found[case]) == tiers


@pytest.mark.parametrize(("case", "tier"), [("elastic", "small"), ("spread", "large")])
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
    chips = [set(each["TPU_VISIBLE_CHIPS"].split(",")) for each in found["TPU"]]
    assert [len(each) for each in chips] == [4, 4]
    assert set.union(*chips) == set("01234567")
    for name in ("NEURON_RT_VISIBLE_CORES", "HABANA_VISIBLE_MODULES"):
        assert sorted(each[name] for each in found["others"]) == ["0", "1"]
