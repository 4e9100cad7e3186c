"""A driver on a Ray of several nodes, some of which are lost; it writes a file of JSON lines.

One process for all of it: a cluster takes longer to start than what happens on it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    make_trainer,
)
from polytrain.ray_api.state import free_resources, living_nodes
from polytrain.testing.processes import eventually, title
from polytrain_plugins import hookimpl


class Nodes:
    """The nodes of the cluster, by name; each holds one worker."""

    def __init__(self) -> None:
        # By default Ray takes a while to be sure that a node is gone.
        config = {"health_check_period_ms": 300, "health_check_failure_threshold": 3}
        head = {"include_dashboard": False, "_system_config": config, **_called("head")}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=40)

    def add(self, *names: str) -> None:
        for name in names:
            self._nodes[name] = self._cluster.add_node(**_called(name))
        self._cluster.wait_for_nodes()

    def kill(self, name: str) -> None:
        """SIGKILL the raylet of a node, as a lost machine would be."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def lose(self, name: str) -> None:
        """The same, and wait until Ray knows."""
        gone = self._nodes[name].node_id
        self.kill(name)
        assert eventually(lambda: gone not in living_nodes())

    def announce(self, name: str) -> None:
        """Say that a node will be taken away in a minute."""
        gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, why_not = gcs.drain_node(
            self._nodes[name].node_id,
            DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "the price has gone up",
            int(time.time() + 60) * 1000,
        )
        assert accepted, why_not

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def _called(name: str) -> dict[str, Any]:
    return {"num_cpus": 1, "env_vars": {"NODE_NAME": name}, "include_log_monitor": False}


class At:
    """An observer that does something when rank 0 reports a step for the first time."""

    def __init__(self, step: int, do: Callable[[], Any], *, aside: bool = True) -> None:
        """
        Args:
            step: which.
            do: what.
            aside: whether the run goes on meanwhile.
        """
        self._step, self._do, self._aside, self._is_done = step, do, aside, False

    @hookimpl
    def polytrain_reported(self, report: Any) -> None:
        if report.step != self._step or self._is_done:
            return
        self._is_done = True
        if self._aside:
            Thread(target=self._do).start()
        else:
            self._do()


def train(config: dict[str, Any]) -> None:
    """Tells where it is; waits for what befalls it for as many attempts as it is told."""
    context = polytrain.get_context()
    attempt, rank = context.get_attempt(), context.get_world_rank()
    place = {"attempt": attempt, "rank": rank, "node": os.environ["NODE_NAME"]}
    print("PLACE " + json.dumps(place), flush=True)
    while True:
        with tempfile.TemporaryDirectory() as directory:
            wanted = rank == 0 and polytrain.checkpoint_requested()
            kept = Checkpoint.from_directory(directory) if wanted else None
            Path(directory, "model").write_text("model")
            preemption = polytrain.get_preemption_info()
            if preemption is not None:
                left_s = (preemption.deadline_ms or 0) / 1000 - time.time()
                known = {"ranks": preemption.preempted_ranks, "left_s": left_s}
                print("PREEMPTION " + json.dumps(known), flush=True)
            polytrain.report({"attempt": attempt}, checkpoint=kept)
        if attempt >= config["attempts"]:
            polytrain.report({"attempt": attempt})
            return
        if rank == config.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if not config.get("reports"):
            signal.pause()
        time.sleep(0.01)


def agents() -> list[int]:
    below = psutil.Process().children(recursive=True)
    return [process.pid for process in below if "ray::RayHost" in title(process)]


def places(run: str) -> list[dict[str, Any]]:
    """Where each rank of each attempt was, as it has told."""
    return printed("PLACE", run)


def printed(what: str, run: str) -> list[dict[str, Any]]:
    """What the ranks have printed with this word before it."""
    logs = Path("runs", run, "logs").glob("*")
    lines = [line for log in sorted(logs) for line in log.read_text().splitlines()]
    return [json.loads(line.split(f"{what} ")[1]) for line in lines if what in line]


def node_of(run: str, *, rank: int) -> str:
    """Where a rank of the first attempt is."""

    def found() -> list[str]:
        return [place["node"] for place in places(run) if place["rank"] == rank]

    assert eventually(found)
    return found()[0]


def fit(
    name: str,
    config: dict[str, Any],
    *observers: Any,
    max_failures: int = 0,
    **scaling: Any,
) -> dict[str, Any]:
    """Run, and tell what became of it."""
    assert eventually(lambda: free_resources().get("CPU") == ray.cluster_resources()["CPU"])
    result = make_trainer(
        "reference",
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(**{"num_workers": 2, **scaling}),
        run_config=RunConfig(
            storage_path="runs",
            name=name,
            progress=False,
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=CheckpointConfig(checkpoint_frequency=0),
            observers=observers,
        ),
    ).fit()
    lines = Path("runs", name, "journal.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {
        "sizes": [entry["world_size"] for entry in entries if entry["event"] == "Launched"],
        "starts": [entry["start"] for entry in entries if entry["event"] == "Launched"],
        "ends": [
            entry["failure"] and {key: entry["failure"][key] for key in ("kind", "rank", "message")}
            for entry in entries
            if entry["event"] == "AttemptEnded"
        ],
        "preemptions": printed("PREEMPTION", name),
        "nodes": {f"{place['attempt']}.{place['rank']}": place["node"] for place in places(name)},
        "finished": result.finished and result.error is None,
    }


def node_is_lost_and_a_standby_is_there(nodes: Nodes) -> dict[str, Any]:
    nodes.add("b", "c")
    before: list[int] = []
    after: list[int] = []

    def lose() -> None:
        assert eventually(lambda: len(agents()) == 3)
        before.extend(agents())
        nodes.kill(node_of("standby", rank=1))

    observers = At(1, lose), At(2, lambda: after.extend(agents()), aside=False)
    found = fit("standby", {"attempts": 1}, *observers, max_failures=1, standby=1)
    return {**found, "before": before, "after": after}


def node_is_lost_and_nobody_stands_by(nodes: Nodes) -> dict[str, Any]:
    def lose() -> None:
        nodes.kill(node_of("elastic", rank=1))

    return fit("elastic", {"attempts": 1}, At(1, lose), num_workers=(1, 2), max_failures=1)


def node_is_announced_to_go(nodes: Nodes) -> dict[str, Any]:
    nodes.add("d", "e")
    gone: list[str] = []

    def announce() -> None:
        gone.append(node_of("move", rank=1))
        nodes.announce(gone[0])

    reported = fit("move", {"attempts": 1, "reports": True}, At(1, announce))
    nodes.lose(gone[0])
    return reported


def node_goes_before_there_is_a_checkpoint(nodes: Nodes) -> dict[str, Any]:
    nodes.add("f")
    journal = Path("runs", "preempted", "journal.jsonl")

    def announce() -> None:
        node = node_of("preempted", rank=1)
        nodes.announce(node)
        assert eventually(lambda: "about to be taken away" in journal.read_text())
        nodes.kill(node)

    return fit("preempted", {"attempts": 1}, At(1, announce))


def node_loses_two_workers(nodes: Nodes) -> dict[str, Any]:
    nodes.add("g")
    return fit("cooldown", {"attempts": 2, "dies": 1}, max_failures=2)


def node_loses_two_workers_and_there_is_no_other(nodes: Nodes) -> dict[str, Any]:
    nodes.lose("g")
    return fit("stays", {"attempts": 2, "dies": 1}, max_failures=2)


SCENARIOS = (
    node_is_lost_and_a_standby_is_there,
    node_is_lost_and_nobody_stands_by,
    node_is_announced_to_go,
    node_goes_before_there_is_a_checkpoint,
    node_loses_two_workers,
)
SCENARIOS_IN_SWEEP = (node_loses_two_workers_and_there_is_no_other,)


RESULTS = "results.jsonl"


def main() -> None:
    nodes = Nodes()
    try:
        for scenario in SCENARIOS + (SCENARIOS_IN_SWEEP if "sweep" in sys.argv else ()):
            began = time.monotonic()
            try:
                found = scenario(nodes)
            except Exception:
                found = {"error": traceback.format_exc()}
            found["took_s"] = time.monotonic() - began
            # Not on the standard output: the ranks' lines are printed there by another thread.
            with Path(RESULTS).open("a") as results:
                results.write(json.dumps({"scenario": scenario.__name__, **found}) + "\n")
    finally:
        nodes.close()


if __name__ == "__main__":
    main()
