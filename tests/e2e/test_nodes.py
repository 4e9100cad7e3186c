"""Several nodes: addresses, ranks and local ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.driver import PREAMBLE
from tests.sweeps import only_in_sweep

SCRIPT = """
import json
from ray.cluster_utils import Cluster

def node(name, cpus):
    return {"num_cpus": cpus, "resources": {name: 1}, "env_vars": {"NODE_NAME": name}}

head = {"include_dashboard": False, **node("head", 2)}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(**node("small", 1))
cluster.add_node(**node("large", 2))
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=40)

def train():
    context = polytrain.get_context()
    place = {
        "rank": context.get_world_rank(), "size": context.get_world_size(),
        "local": context.get_local_rank(), "local_size": context.get_local_world_size(),
        "node": context.get_node_rank(), "name": os.environ["NODE_NAME"],
    }
    print("PLACE " + json.dumps(place))
    polytrain.report({"done": 1})

result = make_trainer(
    "BACKEND", train, scaling_config=ScalingConfig(num_workers=5),
    run_config=RunConfig(storage_path="runs", progress=False),
).fit()
here = ray.get_runtime_context().get_node_id()
names = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
print("DRIVER " + next(name for name in names if name in ("head", "small", "large")))
ray.shutdown()
cluster.shutdown()
"""


def test_ranks_on_three_nodes(tmp_path: Path) -> None:
    preamble = PREAMBLE + "import ray\n"
    path = tmp_path / "script.py"
    path.write_text(preamble + SCRIPT.replace("BACKEND", "torch"))
    run = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    lines = run.stdout.splitlines()
    places = [json.loads(line.split("PLACE ")[1]) for line in lines if "PLACE" in line]
    places.sort(key=lambda place: place["rank"])
    assert [place["rank"] for place in places] == [0, 1, 2, 3, 4], run.stderr
    assert {place["size"] for place in places} == {5}
    names = [place["name"] for place in places]
    # Ranks of one node are neighbours, numbered from 0 there.
    order = list(dict.fromkeys(names))
    assert names == sorted(names, key=order.index)
    assert {name: names.count(name) for name in order} == {"head": 2, "small": 1, "large": 2}
    for rank, place in enumerate(places):
        assert place["local"] == names[:rank].count(place["name"])
        assert place["local_size"] == names.count(place["name"])
        assert place["node"] == order.index(place["name"])
    # The driver's node comes first: rank 0, whose metrics are shown, is next to the user.
    assert order[0] == next(line.split()[1] for line in lines if line.startswith("DRIVER "))


STANDBY_HERE = """
from ray.cluster_utils import Cluster

cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
)
cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=40)

class WaitForStandby:
    @polytrain_plugins.hookimpl
    def polytrain_reported(self):
        while ray.available_resources().get("CPU", 0) > 0:
            time.sleep(0.01)
        open("standby is there", "w").close()

def train():
    polytrain.report({})
    while not os.path.exists("standby is there"):
        time.sleep(0.01)

result = make_trainer(
    "torch", train,
    scaling_config=ScalingConfig(num_workers=2, standby=1, placement_strategy="STRICT_PACK"),
    run_config=RunConfig(storage_path="runs", progress=False, observers=(WaitForStandby(),)),
).fit()
print("FINISHED", result.finished)
ray.shutdown()
cluster.shutdown()
"""


def test_a_standby_beside_the_driver_whose_workers_are_elsewhere(tmp_path: Path) -> None:
    preamble = PREAMBLE + "import ray\nimport polytrain_plugins\n"
    path = tmp_path / "script.py"
    path.write_text(preamble + STANDBY_HERE)
    run = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert "FINISHED True" in run.stdout, run.stderr


ELSEWHERE = """
import subprocess, sys
from pathlib import Path
from ray.cluster_utils import Cluster

cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
)
Path("runs").mkdir()
# A second node that has another directory under the same name, as another host may.
start = f"ray start --address={cluster.address} --num-cpus=1 --block"
other = subprocess.Popen(
    ["unshare", "--map-root-user", "--mount", "sh", "-c",
     f"MOUNT && exec {Path(sys.executable).parent}/{start}"],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
ray.init(address=cluster.address, log_to_driver=False, logging_level=40)
try:
    while ray.cluster_resources().get("CPU", 0) < 2:
        time.sleep(0.1)
    make_trainer(
        "reference", lambda: print("TRAINED"), scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path="runs", progress=False),
    ).fit()
except polytrain.TrainingFailedError as error:
    print("FAILED", error)
finally:
    ray.shutdown()
    # Without its cluster it would wait for a minute.
    other.terminate()
    other.wait()
    cluster.shutdown()
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mount", "refused", "remedy"),
    [
        pytest.param(
            "mount -t tmpfs tmpfs runs",
            "doesn't see the run's directory {runs}",
            "Set RunConfig.storage_path to a directory that all nodes mount",
            id="another",
        ),
        # In `make test`, `test_storage_check` has such a directory without a cluster.
        only_in_sweep(
            "mount --bind runs runs && mount -o remount,bind,ro runs",
            "can't write to {runs}",
            "(Read-only file system). Mount it there so that this user can write",
            id="read-only",
        ),
    ],
)
def test_a_storage_that_a_node_can_not_use_is_reported_before_training(
    mount: str, refused: str, remedy: str, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(PREAMBLE + "import ray\n" + ELSEWHERE.replace("MOUNT", mount))
    run = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert refused.format(runs=tmp_path / "runs") in run.stdout, run.stderr
    assert remedy in run.stdout
    assert "TRAINED" not in run.stdout
    assert not list(tmp_path.rglob(".polytrain-trial-*"))
