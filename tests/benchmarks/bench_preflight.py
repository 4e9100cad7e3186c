"""How long the nodes of a run take to connect to each other before the first worker starts.

The nodes are processes of one machine: what the network adds is its round trips, three of them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from typing import Any

import ray
from harness import OURS, Bound, Figure, conclude, parse, running_ray, take_turns

from polytrain.policy.links import targets
from polytrain.workers.ray.links import LinkEnd, failed_links

_NODES = (2, 4, 8)
_HOST = "127.0.0.1"
_TIMEOUT_S = 1.5
_WITHIN_S = {2: 0.1}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a bound was missed."""
    options = parse(argv, description=__doc__.splitlines()[0], repetitions=20)
    figures = []
    for nodes in _NODES[:1] if options.quick else _NODES:
        with running_ray(num_cpus=2):
            ends = [
                ray.remote(LinkEnd).options(num_cpus=0).remote(_HOST, None) for _ in range(nodes)
            ]
            _tried(ends)
            parties = {OURS: partial(_tried, ends)}
            what = f"{nodes} nodes, {sum(map(len, targets(nodes)))} connections"
            samples = take_turns(parties, repetitions=options.repetitions, what=what)
            bounds = [Bound(factor=_WITHIN_S[nodes])] if nodes in _WITHIN_S else []
            figures.append(Figure(what=what, samples=samples, bounds=bounds))
    return conclude("Nodes connect to each other before the first worker starts", figures)


def _tried(ends: list[Any]) -> float:
    began = time.perf_counter()
    failed = asyncio.run(failed_links(ends, [_HOST] * len(ends), timeout_s=_TIMEOUT_S))
    assert failed == [], failed
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
