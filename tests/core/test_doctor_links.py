"""`polytrain doctor --nodes all`: how two nodes are connected, and what is said if they aren't."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain.policy.links import FailedLink
from polytrain.policy.placement import NodeAddress
from polytrain.view.doctor import links, machine
from polytrain.view.doctor.finding import Finding, Verdict, checked
from polytrain.view.doctor.links import (
    Endpoint,
    Link,
    Pair,
    findings_of_links,
    ring,
    rounds,
    transports_of,
    verdict,
    world_of,
)
from polytrain_plugins import Backend, Engine

HERE, THERE = (NodeAddress(node_id=name, host="127.0.0.1") for name in "ab")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
def test_each_two_nodes_are_a_pair_once_and_no_node_is_in_two_at_a_time(count: int) -> None:
    nodes = [NodeAddress(node_id=f"{number}", host="") for number in range(count)]
    each_two = list(combinations(nodes, 2))
    found = list(rounds(each_two))
    assert Counter(pair for pairs in found for pair in pairs) == Counter(each_two)
    for pairs in found:
        busy = [node.node_id for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64])
def test_in_a_ring_each_node_has_rank_0_once_and_rank_1_once(count: int) -> None:
    nodes = [NodeAddress(node_id=f"{number}", host="") for number in range(count)]
    firsts, seconds = zip(*ring(nodes), strict=True) if count > 1 else ((), ())
    assert list(firsts) == sorted(seconds, key=nodes.index) == nodes * (count > 1)


class NumbersOnly(Reference):
    """A backend without a transport of bytes."""

    def engine(self) -> ReferenceEngine:
        return _NumbersOnlyEngine(self)


class _NumbersOnlyEngine(ReferenceEngine):
    gather_over_ranks = Engine.gather_over_ranks


def measured(backend: Reference, host: str | None = None) -> list[Link]:
    """What two ranks in two threads measure, at another address than rank 0's if one is given."""
    ends = [Endpoint(backend) for _ in range(2)]
    pair = (HERE, THERE)
    offers = [end.offer(world_of(pair, rank, (), gpus=0).me) for rank, end in enumerate(ends)]
    with ThreadPoolExecutor() as pool:
        if host is not None:
            offers[0] = replace(offers[0], host=host)
            # The first rank would wait for ever: its process is killed.
            return [pool.submit(ends[1].measure, world_of(pair, 1, offers, gpus=0)).result()]
        second = pool.submit(ends[1].measure, world_of(pair, 1, offers, gpus=0))
        first = ends[0].measure(world_of(pair, 0, offers, gpus=0))
        return [first, second.result()]


def test_two_ranks_measure_their_connection() -> None:
    for link in measured(Reference()):
        assert 0 < link.latency_s < 60
        assert link.bytes_per_s is not None
        assert link.bytes_per_s > 0


def test_bytes_that_would_travel_as_numbers_are_not_measured() -> None:
    for link in measured(NumbersOnly()):
        assert 0 < link.latency_s < 60
        assert link.bytes_per_s is None


def test_an_address_at_which_nobody_listens() -> None:
    """Such as a name that resolves to 127.0.1.1 on its own node."""
    with pytest.raises(ConnectionRefusedError):
        measured(Reference(), host="127.0.1.1")


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


def test_all_that_are_installed_are_tried_torch_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["reference", "torch", "xgboost"]
    assert [each.name for each in transports_of(names)] == ["torch", "reference", "xgboost"]
    missing = {"xgboost": "pip install xgboost"}
    monkeypatch.setattr(
        links,
        "missing_modules",
        lambda requires: {each: missing[each] for each in requires if each in missing},
    )
    assert [each.name for each in transports_of(names)] == ["torch", "reference"]


class Other(Reference):
    """A second backend."""

    name = "other"


class Joined:
    """Two processes that join."""

    def __init__(self, backend: Backend, pair: Pair, *, gpus: int) -> None:
        pass

    def link(self, join_timeout_s: float) -> Link:
        return Link(latency_s=84e-6, bytes_per_s=None)

    def close(self) -> None:
        pass


def findings_if(
    failed: list[FailedLink], count: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Finding]:
    """What is found of some nodes, between which these connections fail, with two backends."""
    monkeypatch.setattr(links, "_failed_links", lambda _: failed)
    monkeypatch.setattr(links, "_PairOnRay", Joined)
    nodes = [NodeAddress(node_id=f"{number}", host=f"n{number}") for number in range(count)]
    found = list(findings_of_links([Reference(), Other()], nodes, {}))
    by_name = {each.check: each for each in found}
    assert len(by_name) == len(found)
    return by_name


def test_two_nodes_are_tried_both_ways_by_tcp_and_each_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(findings_if([], 2, monkeypatch)) == {
        "plain TCP to n0",
        "plain TCP to n1",
        *(
            f"{first} to {second} ({name})"
            for first, second in (("n0", "n1"), ("n1", "n0"))
            for name in ("reference", "other")
        ),
    }


def test_many_nodes_make_a_few_findings_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(findings_if([], 64, monkeypatch)) == 64 * 3


def test_a_firewall_in_one_direction_is_found_and_backends_are_not_tried_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = FailedLink(source="n0", target="n1", reason="port 40000 doesn't answer within 5 s")
    found = findings_if([refused], 3, monkeypatch)
    blocked = found["plain TCP to n1"]
    assert blocked.verdict is Verdict.FAILED
    assert blocked.what == "n0 can't connect to n1 (port 40000 doesn't answer within 5 s)"
    assert "Let other nodes connect to n1 over TCP, " in blocked.remedy
    assert found["plain TCP to n0"].what == "2 other nodes connect to it"
    assert not any(each.startswith(("n0 to n1", "n1 to n0")) for each in found)
    assert "n1 to n2 (reference)" in found


ALL = only_in_sweep("reference", "all")

TWO_NODES = """
import json, sys
from contextlib import contextmanager
from dataclasses import asdict, replace
import ray
from ray.cluster_utils import Cluster
from polytrain.policy.placement import NodeAddress
from polytrain.storage.location import Location
from polytrain.view.doctor import links, nodes as doctor_nodes
from polytrain.backends.reference import Reference, ReferenceEngine
from polytrain_plugins import load_backend

class Misnamed(Reference):
    def engine(self):
        return MisnamedEngine(self)

class MisnamedEngine(ReferenceEngine):
    @contextmanager
    def offering(self, me):
        with super().offering(me) as offer:
            # As if the node's name resolved to its own loopback interface.
            yield replace(offer, host="127.0.1.1") if me.rank == 0 else offer

class Silent(Reference):
    def engine(self):
        return SilentEngine(self)

class SilentEngine(ReferenceEngine):
    @contextmanager
    def joined(self, world):
        # As behind a firewall that drops what comes.
        __import__("threading").Event().wait()
        yield

has_gpus = sys.argv[2] == "all"
quiet = {"include_log_monitor": False, "num_cpus": 1}
head = {"include_dashboard": False, "num_gpus": 2 * has_gpus, **quiet}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(num_gpus=1 * has_gpus, **quiet)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level=40)
nodes = [NodeAddress(node_id=n["NodeID"], host=n["NodeManagerAddress"]) for n in ray.nodes()]
found = {}
location = Location.of(sys.argv[3])
found["Misnamed"] = list(doctor_nodes.findings_of_nodes(location, [Misnamed()]))
backend = load_backend(sys.argv[1])()
found[type(backend).__name__] = list(links.findings_of_links([backend], nodes, {}))
gpus = {n["NodeID"]: n["Resources"].get("GPU", 0.0) for n in ray.nodes()}
if has_gpus:
    found["Silent"] = list(links.findings_of_links([Silent()], nodes, {}, join_timeout_s=1))
    found["GPUs"] = list(links.findings_of_links([Reference()], nodes, gpus))
print("FOUND " + json.dumps({k: [asdict(f) for f in each] for k, each in found.items()}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.on_ray
@pytest.mark.parametrize(
    ("name", "which"), [("reference", "few"), only_in_sweep("torch", "few"), ALL]
)
def test_two_nodes(name: str, which: str, tmp_path: Path) -> None:
    """Each is checked; actors on both join each other, and what keeps them from it is shown."""
    script, storage = tmp_path / "script.py", tmp_path / "storage"
    storage.mkdir()
    script.write_text(TWO_NODES)
    done = subprocess.run(
        [sys.executable, script, name, which, storage], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout + done.stderr
    found = json.loads(lines[0].removeprefix("FOUND "))
    of_node = [*machine.CHECKS, "versions", "storage", "clock"]
    on_nodes = [found["Misnamed"].pop(0) for _ in range(2 * len(of_node))]
    assert [each["check"].partition(": ")[2] for each in on_nodes] == 2 * of_node
    assert not [each for each in on_nodes if each["verdict"] == "failed"]
    assert list(storage.iterdir()) == []
    for each in found.values():
        tcp = [each.pop(0) for _ in range(2)]
        assert [finding["what"] for finding in tcp] == ["1 other node connects to it"] * 2
    misnamed, *others = found.pop("Misnamed")
    assert len(others) == (3 if which == "all" else 1)
    assert misnamed["verdict"] == "failed"
    assert misnamed["what"].startswith("they didn't join: ConnectionRefusedError: ")
    assert "127.0.1.1" in misnamed["remedy"]
    if which == "all":
        silent, _ = found.pop("Silent")
        assert (silent["verdict"], silent["what"]) == ("failed", "they didn't join within 1 s")
        # Of both nodes, and of the node that has two.
        assert [each["check"].rpartition(" (")[2] for each in found.pop("GPUs")] == [
            "reference)",
            "reference)",
            "reference, GPUs)",
            "reference, GPUs)",
        ]
    [both_ways] = found.values()
    assert len(both_ways) == 2
    for good in both_ways:
        assert good["verdict"] != "failed"
        assert good["what"].startswith("joined, ")
        assert "MB/s each way" in good["what"]
        assert good["check"].endswith(f" ({name})")
