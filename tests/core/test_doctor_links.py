"""`polytrain doctor --nodes all`: how two nodes are connected, and what is said if they aren't."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

from polytrain.backends.reference import Reference
from polytrain.policy.placement import NodeAddress
from polytrain.view.doctor.finding import Verdict, checked
from polytrain.view.doctor.links import Endpoint, Link, rounds, transport_of, verdict, world_of
from polytrain_plugins import Offer

HERE, THERE = (NodeAddress(node_id=name, host="127.0.0.1") for name in "ab")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
def test_each_two_nodes_are_a_pair_once_and_no_node_is_in_two_at_a_time(count: int) -> None:
    nodes = [NodeAddress(node_id=f"{number}", host="") for number in range(count)]
    found = list(rounds(nodes))
    assert Counter(pair for pairs in found for pair in pairs) == Counter(combinations(nodes, 2))
    for pairs in found:
        busy = [node.node_id for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))


def measured(offers: Sequence[Offer | None] = (None, None)) -> list[Link]:
    """What two ranks in two threads measure, with what they offer replaced by some."""
    ends = [Endpoint(Reference()) for _ in range(2)]
    pair = (HERE, THERE)
    made = [end.offer(world_of(pair, rank, (), gpus=0).me) for rank, end in enumerate(ends)]
    final = [given or own for given, own in zip(offers, made, strict=True)]
    with ThreadPoolExecutor() as pool:
        second = pool.submit(ends[1].measure, world_of(pair, 1, final, gpus=0))
        if any(offers):
            # The first rank would wait for ever: its process is killed.
            return [second.result()]
        first = ends[0].measure(world_of(pair, 0, final, gpus=0))
        return [first, second.result()]


def test_two_ranks_measure_their_connection() -> None:
    for link in measured():
        assert 0 < link.latency_s < 60
        # Its bytes would travel as numbers.
        assert link.bytes_per_s is None


def test_an_address_at_which_nobody_listens() -> None:
    """Such as a name that resolves to 127.0.1.1 on its own node."""
    with pytest.raises(ConnectionRefusedError):
        measured([Offer(host="127.0.1.1", port=9), None])


@pytest.mark.parametrize(
    ("link", "verdict_", "text"),
    [
        (Link(latency_s=84e-6, bytes_per_s=1.16e9), "ok", "joined, 84 µs for a sum, 1160 MB/s"),
        (Link(latency_s=84e-6, bytes_per_s=None), "ok", "joined, 84 µs for a sum"),
        (Link(latency_s=84e-6, bytes_per_s=5e6), "warning", "5 MB/s each way: training that sums"),
        (Link(latency_s=0.05, bytes_per_s=1e9), "warning", "50000 µs for a sum, 1000 MB/s"),
        (Link(latency_s=math.inf, bytes_per_s=None), "warning", "inf"),
    ],
)
def test_a_slow_connection_is_a_warning(link: Link, verdict_: str, text: str) -> None:
    finding = checked("a to b", lambda: verdict(lambda: link))
    assert finding.verdict is Verdict(verdict_)
    assert text in finding.what
    assert bool(finding.remedy) == (verdict_ == "warning")


def test_torch_comes_first() -> None:
    names = [transport_of(given) for given in (["reference", "torch"], ["reference"], [])]
    assert [each and each.name for each in names] == ["torch", "reference", None]


ALL = only_in_sweep("reference", "all")

TWO_NODES = """
import json, sys
from contextlib import contextmanager
from dataclasses import asdict
import ray
from ray.cluster_utils import Cluster
from polytrain.policy.placement import NodeAddress
from polytrain.view.doctor import links
from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain_plugins import Offer, load_backend

class Misnamed(Reference):
    def engine(self):
        return MisnamedEngine(self)

class MisnamedEngine(ReferenceEngine):
    @contextmanager
    def offering(self, me):
        with super().offering(me) as offer:
            # As if the node's name resolved to its own loopback interface.
            yield Offer(host="127.0.1.1", port=9) if me.rank == 0 else offer

class Silent(Reference):
    def engine(self):
        return SilentEngine(self)

class SilentEngine(ReferenceEngine):
    @contextmanager
    def joined(self, world):
        # As behind a firewall that drops what comes.
        __import__("threading").Event().wait()
        yield

head = {"include_dashboard": False, "num_cpus": 1, "num_gpus": 2}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(num_cpus=1, num_gpus=1)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=40)
nodes = [NodeAddress(node_id=n["NodeID"], host=n["NodeManagerAddress"]) for n in ray.nodes()]
found = {}
for backend in [Misnamed(), load_backend(sys.argv[1])()]:
    found[type(backend).__name__] = list(links.findings_of_links(backend, nodes, {}))
gpus = {n["NodeID"]: n["Resources"].get("GPU", 0.0) for n in ray.nodes()}
if sys.argv[2] == "all":
    found["Silent"] = list(links.findings_of_links(Silent(), nodes, {}, join_timeout_s=1))
    found["GPUs"] = list(links.findings_of_links(Reference(), nodes, gpus))
print("FOUND " + json.dumps({k: [asdict(f) for f in each] for k, each in found.items()}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.on_ray
@pytest.mark.parametrize(
    ("name", "which"), [("reference", "few"), only_in_sweep("torch", "few"), ALL]
)
def test_two_nodes(name: str, which: str, tmp_path: Path) -> None:
    """Actors on two raylets join each other, and what keeps them from it is shown."""
    script = tmp_path / "script.py"
    script.write_text(TWO_NODES)
    done = subprocess.run(
        [sys.executable, str(script), name, which], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout + done.stderr
    found = json.loads(lines[0].removeprefix("FOUND "))
    [misnamed] = found.pop("Misnamed")
    assert misnamed["verdict"] == "failed"
    assert misnamed["what"].startswith("they didn't join: ConnectionRefusedError: ")
    assert "127.0.1.1" in misnamed["remedy"]
    if which == "all":
        [silent] = found.pop("Silent")
        assert (silent["verdict"], silent["what"]) == ("failed", "they didn't join within 1 s")
        # Of both nodes, and of the node that has two.
        assert [each["check"].rpartition(" (")[2] for each in found.pop("GPUs")] == [
            "reference)",
            "reference, GPUs)",
            "reference, GPUs)",
        ]
    [[good]] = found.values()
    assert good["verdict"] != "failed"
    assert good["what"].startswith("joined, ")
    assert ("MB/s each way" in good["what"]) == (name == "torch")
    assert good["check"].endswith(f" ({name})")
